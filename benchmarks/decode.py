"""Time how long a receiver takes to decode the messages of 8 ranks and add them up.

    taskset -c 0,1 python -m benchmarks.decode

Each message has 1 % of 25 million entries, as bf16 values and Elias-Fano indices. Times are shown
in milliseconds and as multiples of a dense pass, so that results of different machines can be
compared. A dense pass reads and writes 25 million float32 values. It is measured twice: with all of
torch's threads, as adding up and encoding use them, and with one thread, as decoding indices alone
does.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from torchcomp.compressors import TopK
from torchcomp.compressors.base import Vectors
from torchcomp.kernels import elias_fano

Case = Callable[[Tensor], object]
# The cases alternate between this many vectors. Together they do not fit into a cache.
VECTORS = 4


def messages(ranks: int, n: int, k: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each rank: indices, and the values and the code of a message."""
    generator = np.random.default_rng(0)
    vectors, made = of(n, k), []
    for _ in range(ranks):
        index = torch.from_numpy(np.sort(generator.choice(n, k, replace=False)))
        x = torch.zeros(n)
        x[index] = torch.from_numpy(generator.standard_normal(k).astype(np.float32))
        ((values, code),) = vectors.kernels.encode(x, index, None)
        made.append((index, values, code))
    return made


def of(n: int, k: int) -> Vectors:
    return Vectors.of(TopK(k=k, values="bf16"), n)


def dense(out: Tensor) -> None:
    out.mul_(1.0000001)


def dense_on_one_thread(out: Tensor) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    out.mul_(1.0000001)
    torch.set_num_threads(threads)


def cases(sent: list[tuple[Tensor, Tensor, Tensor]], n: int, k: int) -> dict[str, Case]:
    packed, kernels = [[(values, code)] for _, values, code in sent], of(n, k).kernels
    x, segments = torch.zeros(n), of(n, k).segments

    def one_call(out: Tensor) -> None:
        kernels.accumulate(packed, out, 1 / len(sent))

    def call_per_message(out: Tensor) -> None:
        for message in packed:
            kernels.accumulate([message], out, 1 / len(sent))

    def index_add(out: Tensor) -> None:
        for _, values, code in sent:
            # An invalid code must stop the step, so NaN replaces its values, as in `accumulate`.
            index, damaged = elias_fano.decode([code], segments)
            decoded = torch.where(damaged, torch.nan, values.float())
            out.index_add_(0, index, decoded, alpha=1 / len(sent))

    def encode(out: Tensor) -> None:
        for index, _, _ in sent:
            kernels.encode(x, index, None)

    return {
        "dense pass, all threads": dense,
        "dense pass, one thread": dense_on_one_thread,
        "add up, one call": one_call,
        "add up, call per message": call_per_message,
        "plain torch, message after message": index_add,
        "encode": encode,
    }


def fastest(timed: dict[str, Case], vectors: list[Tensor], repeats: int) -> dict[str, float]:
    """Seconds per case: the fastest of `repeats` rounds over all cases."""
    times: dict[str, list[float]] = {name: [] for name in timed}
    measured = 0
    # One round more than `repeats`: the first one compiles the kernels.
    for _ in range(repeats + 1):
        for name, case in timed.items():
            out = vectors[measured % len(vectors)]
            measured += 1
            start = time.perf_counter()
            case(out)
            times[name].append(time.perf_counter() - start)
    # The minimum, because other work on the machine can only make a case slower.
    return {name: min(taken[1:]) for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=25_000_000, help="entries of the vector")
    parser.add_argument(
        "--ratio", type=float, default=0.01, help="fraction of entries in a message"
    )
    parser.add_argument("--ranks", type=int, default=8, help="number of messages")
    parser.add_argument("--repeats", type=int, default=21, help="rounds over all cases")
    args = parser.parse_args()
    k = max(1, int(args.ratio * args.n))
    timed = cases(messages(args.ranks, args.n, k), args.n, k)
    times = fastest(timed, [torch.zeros(args.n) for _ in range(VECTORS)], args.repeats)
    bits = 8 * elias_fano.nbytes(args.n, k) / k
    print(f"{args.ranks} messages of {k} of {args.n}, {bits:.2f} bits per index")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    # cases() lists the two dense passes first.
    all_threads, one = list(times.values())[:2]
    print(f"{'':28}{'ms':>9}{'dense':>9}{'dense, 1 thread':>17}")
    for name, taken in times.items():
        print(f"{name:28}{1e3 * taken:9.2f}{taken / all_threads:9.2f}{taken / one:17.2f}")


if __name__ == "__main__":
    main()
