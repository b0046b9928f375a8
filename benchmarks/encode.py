"""Time encoding and decoding on the CPU, compared with the memory floor of the same run.

    python -m benchmarks.encode --threads 2 --out benchmarks/results/encode.csv

Rows of the output:

    select warm, cold       add and select with the workspace of the previous step, and without it
    message                 the values and the Elias-Fano code of the indices
    subtract                subtracting what is sent
    encode warm, cold       all of the above, as ``ef(topk(...))`` calls it
    decode 8                adding up 8 messages, as a receiver does
    add + np.partition      the reference implementation, without Numba
    add + torch.topk        (at 1 % only, because it takes seconds)

Encoding is compared with the *floor*. Error feedback with TopK must read the gradient and the
residual and write the new residual: 12 bytes per entry. The floor is the time for this at the speed
of a copy in the same run. Decoding is compared with the *pass*: one pass over n floats in place,
which reads and writes 4 bytes per entry each.

Every value is a median over the steps. *Cold* steps start without a workspace, including the memory
for candidates. Gradients are new in every step, normal with one of two scales per entry. The
residual is the one that error feedback makes of them, so thresholds drift as they do in training.
"""

import argparse
import csv
import datetime
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

from benchmarks.net.rows import processor
from torchcomp.compressors import TopK
from torchcomp.compressors.base import Message, Vectors
from torchcomp.engine.keys import Key
from torchcomp.kernels import pool, select
from torchcomp.kernels.segments import Segment

SIZES = (100_000, 1_000_000, 10_000_000, 25_000_000)
RATIOS = (0.001, 0.01, 0.1)
# The largest vector that selection leaves to one thread.
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
    """Median milliseconds of every row, by name."""
    clock = Clock()
    for start in ("cold", "warm"):
        run = Training(n, ratio)
        memory_speed(clock, run)
        for step in range(steps + 2):
            if start == "cold":
                run.vectors = Vectors.of(run.topk, n)
            # The first two steps compile and find a threshold. They are not recorded.
            run.step(clock if step >= 2 else Clock(), start)
    decode(clock, run, steps)
    alternatives(clock, run, slow=ratio == 0.01)
    times = clock.medians()
    # A copy moves 8 bytes per entry and the floor 12.
    times["floor"] = 1.5 * times.pop("copy")
    return times


class Training:
    """The gradients and the residual of one rank."""

    def __init__(self, n: int, ratio: float) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.scale = 0.1 + 0.9 * (torch.rand(n, generator=self.generator) < 0.1)
        self.topk = TopK(ratio)
        self.vectors = Vectors.of(self.topk, n)
        self.messages: deque[Message] = deque(maxlen=8)
        # Write to all pages. Until then, the kernel maps them to one page of zeros, which is fast
        # to read.
        self.g, self.e, self.x = (torch.zeros(n).fill_(value) for value in (1.0, 0.0, 0.0))

    def step(self, clock: Clock, start: str) -> None:
        self.g.normal_(generator=self.generator).mul_(self.scale)
        g, e, x, topk, vectors = self.g, self.e, self.x, self.topk, self.vectors
        begin = time.perf_counter()
        index = clock(f"select {start}", lambda: topk.select_sum(g, e, x, vectors))
        message = clock("message", lambda: topk.encode_selected(x, index, vectors, KEY))
        clock("subtract", lambda: topk.subtract(message, x, vectors, KEY))
        clock.times[f"encode {start}"].append((time.perf_counter() - begin) * 1e3)
        self.messages.append(message.parts)
        # As in ef: the sum minus what was sent is the new residual.
        self.e, self.x = x, e


def memory_speed(clock: Clock, run: Training, times: int = 11) -> None:
    """Time a copy: the same arrays, back to back, with as many threads as the selection."""
    # This floor is strict. A repeated copy finds arrays that fit into the last cache there, while
    # a real step comes after other work and does not.
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
    """Add up the messages of the last 8 steps, as if they came from 8 ranks."""
    messages = list(run.messages)

    def add_up() -> None:
        run.topk.accumulate(messages, run.x, run.vectors, KEY)

    def dense() -> None:
        in_threads(negate, run.x.numpy())

    assert len(messages) == 8
    # Like with like: each case comes after a new gradient was drawn and the vector was set to zero,
    # as in a step.
    for _ in range(times):
        for name, work in {"pass": dense, "decode 8": add_up}.items():
            run.g.normal_()
            run.x.zero_()
            clock(name, work)


def alternatives(clock: Clock, run: Training, slow: bool, times: int = 3) -> None:
    """Other ways to select."""
    g, e, x = run.g, run.e, run.x
    k = run.topk.kept(g.numel())
    whole = [Segment(0, g.numel(), k)]

    def added(select: Callable[[], object]) -> Callable[[], object]:
        return lambda: (torch.add(g, e, out=x), select())

    for _ in range(times):
        clock("add + np.partition", added(lambda: select.largest(x, whole)))
        if slow:
            clock("add + torch.topk", added(lambda: torch.topk(x.abs(), k, sorted=False)))


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
    # The units of decoding. Everything else is compared with the floor.
    units = dict.fromkeys(("pass", "decode 8"), "pass")
    measured = []
    for what, milliseconds in times.items():
        of = units.get(what, "floor")
        figures = {"ms": f"{milliseconds:.3f}", "of": of, "of_ms": f"{times[of]:.3f}"}
        measured.append({**conditions, "what": what, **figures})
    return measured


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
    parser.add_argument("--out", type=Path, help="CSV file to write; without it, only print")
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
