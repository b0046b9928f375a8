"""What encoding and decoding cost on the CPU, against the memory floor of the same run.

    python benchmarks/encode.py --threads 2 --out benchmarks/results/encode.csv

Error feedback with TopK must read the gradient and the memory and write the new memory: 12 bytes an
entry. The *floor* is the time of that at the bandwidth at which this machine copies. Copying n
floats moves 8 bytes an entry, so it is 1.5 times the median copy. It is repeated over the same
arrays, back to back, with the threads that the selection runs on (one, for a vector that it leaves
to one). That is a strict floor: of arrays that fit into the last cache, a repeated copy finds some
there, and a step of training that comes after others does not.

The *pass* is one over n floats in place, so it reads and writes 4 bytes an entry each. Decoding is
compared with it, like with like: either both come after a new gradient was drawn and the vector
was set to zero, as in a step, or both are repeated back to back, each by itself.

Gradients are fresh in every step, normal with one of two scales an entry, and the memory is what
error feedback makes of them, so a warm start sees the drift that it sees in training. Rows:

    select warm, cold       add_and_select with what the last step left, and without anything
    message                 what comes after it: the values and the Elias-Fano code of the indices
    subtract                taking out what is sent
    encode warm, cold       all of it, as ``ef(topk(...))`` calls it
    decode 8                adding up 8 messages, as the receiver does, against the pass
    decode 8 in turn        the same, one message after the other
    decode 8, pass repeated     both back to back
    add + np.partition      the reference form, without Numba
    add + torch.topk, add + torch.kthvalue     (at 1 % only; they take seconds)
    PowerSGD                rank 1 on a square view: add, two products, orthogonalise, subtract

Every figure is a median over the steps. *Cold* steps start without anything, memory for candidates
included. Designs of the pass that were tried, at 1 %, each by itself and not as rows of the CSV:

- a branch for every 16 entries in plain Numba: 1.9 times torch.add at n = 25e6, two threads. LLVM
  does not vectorise the comparison;
- 64 entries compared at once, the addition in a loop over absolute indices: 78 us for 100,000
  entries on one thread, of which the addition, not vectorised either, takes 62;
- the same with the addition over slices: 28 us;
- both in plain Numba loops over blocks of 256 to 2,048: a whole encoding takes
  1.1 to 1.9 times as long (minima, AVX2);
- candidates' memory from NumPy instead of torch: cold 20 to 40 ms at n = 25e6 instead of 20,
  because NumPy asks for huge pages.

Designs of adding up 8 messages of 1 % of 25e6 entries, by the threads' CPU time, both repeated back
to back, in passes (1.9 ms on two threads):

- message after message, all indices decoded to int64 before they are added: 9;
- checked first, then decoded once more for each block of the vector while adding: 2.4;
- decoded to 32 bits in one loop that takes and checks bit after bit, then added in blocks: 2.1;
- the same in three loops, as it is now: 1.9. Blocks of 64 KiB to 1 MiB take the same time, and
  to load or prefetch each block beforehand makes it slower.

What changed the selection in training (four processes of one thread each on four cores, the vectors
of ResNet-18's shards, 1 %, caches emptied; milliseconds of CPU a step, 16.8 before, 8.2 after):

- bounds that follow how much thresholds move: of the warm guesses 41 % were too tight, now 5 %;
- adding and comparing in one vector loop, the first digit counted on the way: 17.1 to 10.7;
- stores that pass the caches by, above 512 KiB: 10.7 to 9.0; prefetching with them: 9.0 to 8.2.
  Both are gone again: on another, shared machine (AVX2) encoding without them took 0.88 to 1.25
  and 0.95 to 1.17 times as long, the most for the largest vectors. Without both, selecting from
  1e7 or 2.5e7 entries takes 1.2 to 1.3 times as long (two threads, minima of three runs);
- one compiled call for a whole selection, now two: 60 to 20 us of fixed cost a call with one.

A radix histogram of the whole vector as the cold start needs no guess, but three more passes; a
sample of 32,768 entries takes a twelfth of one pass at n = 25e6.
"""

import argparse
import csv
import datetime
import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcomp.compressors import TopK
from torchcomp.kernels import pool, select
from torchcomp.kernels.select import Scratch
from torchcomp.keys import Key

SIZES = (100_000, 1_000_000, 10_000_000, 25_000_000)
RATIOS = (0.001, 0.01, 0.1)
SERIAL = 1 << 20
KEY = Key(0)
T = TypeVar("T")
COLUMNS = ("date", "device", "threads", "torch", "numba", "n", "k", "what", "ms", "of", "of_ms")


class Clock:
    """Collects times by name, in milliseconds."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)

    def __call__(self, name: str, work: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = work()
        self.times[name].append((time.perf_counter() - start) * 1e3)
        return result

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(times) for name, times in self.times.items()}


def measure(n: int, ratio: float, steps: int) -> dict[str, float]:
    """Median milliseconds of everything, by name."""
    clock = Clock()
    for start in ("cold", "warm"):
        run = Training(n, ratio)
        memory_speed(clock, run)
        for step in range(steps + 2):
            if start == "cold":
                run.scratch = Scratch()
            run.step(clock if step >= 2 else Clock(), start)
    decode(clock, run, steps)
    baselines(clock, run, slow=ratio == 0.01)
    times = clock.medians()
    times["floor"] = 1.5 * times.pop("copy")
    return times


class Training:
    """The gradients and the error memory of one rank."""

    def __init__(self, n: int, ratio: float) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.scale = 0.1 + 0.9 * (torch.rand(n, generator=self.generator) < 0.1)
        self.topk = TopK(ratio)
        self.scratch = Scratch()
        self.messages: deque[tuple[Tensor, ...]] = deque(maxlen=8)
        # Written, because pages that never were are all one page of zeros, and fast to read.
        self.g, self.e, self.x = (torch.zeros(n).fill_(value) for value in (1.0, 0.0, 0.0))

    def step(self, clock: Clock, start: str) -> None:
        self.g.normal_(generator=self.generator).mul_(self.scale)
        g, e, x = self.g, self.e, self.x
        begin = time.perf_counter()
        index = clock(f"select {start}", lambda: self.topk.select_sum(g, e, x, self.scratch))
        message = clock("message", lambda: self.topk.encode_selected(x, index, KEY))
        clock("subtract", lambda: self.topk.subtract(message, x, KEY))
        clock.times[f"encode {start}"].append((time.perf_counter() - begin) * 1e3)
        self.messages.append(message.parts)
        self.e, self.x = x, e


def memory_speed(clock: Clock, run: Training, times: int = 11) -> None:
    for _ in range(times):
        clock("copy", partial(in_threads, np.copyto, run.x.numpy(), run.g.numpy()))


def in_threads(work: Callable[..., object], *arrays: NDArray[np.float32]) -> None:
    n = arrays[0].size
    parts = torch.get_num_threads() if n > SERIAL else 1
    ends = [n * part // parts for part in range(parts + 1)]
    pool.each(lambda part: work(*(a[ends[part] : ends[part + 1]] for a in arrays)), parts)


def negate(x: NDArray[np.float32]) -> None:
    np.negative(x, out=x)


def decode(clock: Clock, run: Training, times: int) -> None:
    """Adds the messages of the last 8 steps up, as if they came from 8 ranks."""

    messages = list(run.messages)

    def in_turn() -> None:
        for message in messages:
            run.topk.accumulate([message], run.x, KEY)

    def at_once() -> None:
        run.topk.accumulate(messages, run.x, KEY)

    def dense() -> None:
        in_threads(negate, run.x.numpy())

    assert len(messages) == 8
    cases = {"pass": dense, "decode 8": at_once, "decode 8 in turn": in_turn}
    for _ in range(times):
        for name, work in cases.items():
            run.g.normal_()
            run.x.zero_()
            clock(name, work)
    for name, work in {"pass": dense, "decode 8": at_once}.items():
        for _ in range(times):
            clock(f"{name} repeated", work)


def baselines(clock: Clock, run: Training, slow: bool, times: int = 3) -> None:
    g, e, x = run.g, run.e, run.x
    k = run.topk.kept(g.numel())

    def added(select: Callable[[], object]) -> Callable[[], object]:
        return lambda: (torch.add(g, e, out=x), select())

    q = torch.randn(math.isqrt(g.numel()), 1)
    for _ in range(times):
        clock("add + np.partition", added(lambda: select.largest_on_host(magnitude(x), k)))
        clock("PowerSGD", lambda: power_sgd(g, e, x, q))
        if slow:
            clock("add + torch.topk", added(lambda: torch.topk(x.abs(), k, sorted=False)))
            clock("add + torch.kthvalue", added(lambda: kth_value(x, k)))


def magnitude(x: Tensor) -> Tensor:
    return x.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)


def kth_value(x: Tensor, k: int) -> Tensor:
    magnitude = x.abs()
    return torch.nonzero(magnitude >= torch.kthvalue(magnitude, x.numel() - k + 1).values)


def power_sgd(g: Tensor, e: Tensor, x: Tensor, q: Tensor) -> None:
    """What PyTorch's hook computes for a square matrix, without its two all-reduces."""
    side = q.numel()
    torch.add(g, e, out=x)
    matrix = x[: side * side].view(side, side)
    p = matrix @ q
    p /= p.norm()
    q = matrix.t() @ p
    matrix.addmm_(p, q.t(), alpha=-1.0)


# --- Rows -----------------------------------------------------------------------------------------


def rows(n: int, ratio: float, times: dict[str, float]) -> list[dict[str, object]]:
    conditions = {
        "date": datetime.date.today().isoformat(),
        "device": processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "numba": numba_version(),
        "n": n,
        "k": TopK(ratio).kept(n),
    }
    units = dict.fromkeys(("pass", "decode 8", "decode 8 in turn"), "pass")
    units |= dict.fromkeys(("pass repeated", "decode 8 repeated"), "pass repeated")
    measured = []
    for what, milliseconds in times.items():
        of = units.get(what, "floor")
        figures = {"ms": f"{milliseconds:.3f}", "of": of, "of_ms": f"{times[of]:.3f}"}
        measured.append({**conditions, "what": what, **figures})
    return measured


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.split(": ")[1] for line in lines if line.startswith("model name"))


def numba_version() -> str:
    try:
        import numba
    except ImportError:
        return "none"
    return str(numba.__version__)


def show(row: dict[str, object]) -> None:
    ratio = float(str(row["ms"])) / float(str(row["of_ms"]))
    print(f"{row['n']:>10} {row['k']:>9}  {row['what']:<22} {row['ms']:>10} ms  ", end="")
    print(f"{ratio:8.2f} × {row['of']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--out", type=Path, help="CSV file to write; by default only print")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    measured = []
    for n in arguments.sizes:
        for ratio in RATIOS:
            found = rows(n, ratio, measure(n, ratio, arguments.steps))
            for row in found:
                show(row)
            measured += found
    if arguments.out:
        with arguments.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(measured)


if __name__ == "__main__":
    main()
