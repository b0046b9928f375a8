"""Show where the host's time goes: cProfile of `Averager.average` on one bucket, method by method.

    python -m benchmarks.gpu.profile
    python -m benchmarks.gpu.profile 'ef(topk(0.01))' --ranks 64
    python -m benchmarks.gpu.profile --rehearse          # on the CPU, with a small bucket

The other ranks exist only in name; see ranks.py. Only the calling thread is seen. cProfile adds
about as much time as short calls take: compare its rows with each other, and take the time of a
bucket from the head, which is measured without it. Seconds are the sum over all repeats.
"""

import argparse
import cProfile
import io
import pstats
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.device import Device
from benchmarks.gpu.methods import BUCKET, Steps
from benchmarks.gpu.training import METHODS
from benchmarks.net.names import BASELINES

_ROOT = Path(__file__).parents[2]
_OURS = "torchcomp/"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    specs = [spec for spec in METHODS if spec not in BASELINES]
    parser.add_argument("specs", nargs="*", default=specs, help="by default those of the steps")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--lines", type=int, default=28, help="rows of each profile")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with a small bucket")
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        sys.exit("there is no CUDA device here; --rehearse runs on the CPU")
    device = Device("cpu" if options.rehearse else "cuda")
    for spec in options.specs:
        # Sizes that the ranks divide, and of their shards a whole 1 %.
        n = BUCKET // 8 if options.rehearse else BUCKET
        print(profiled(device, spec, n, options), flush=True)


def profiled(device: Device, spec: str, n: int, options: Any) -> str:
    """Return the profile of one method on a bucket of n entries."""
    steps = Steps(spec, options.ranks, device.place, n, seed=0)
    for _ in range(3):  # compiles, and finds thresholds
        steps.begin()
        steps.average()
    times = [
        device.host_microseconds(steps.average, 1, steps.begin) for _ in range(options.repeats)
    ]
    profiler = cProfile.Profile()
    for _ in range(options.repeats):
        steps.begin()
        device.wait()
        profiler.enable()
        steps.average()
        profiler.disable()
    head = f"== {spec}: {statistics.median(times):.0f} us, at best {min(times):.0f}"
    return f"{head}\n   {counted(profiler, options.repeats)}\n{table(profiler, options.lines)}"


def counted(profiler: cProfile.Profile, repeats: int) -> str:
    """Return how many Python functions a bucket calls, as a sentence without its end."""
    calls = pstats.Stats(profiler).stats
    python = {place: row[1] for place, row in calls.items() if place[0] != "~"}  # no builtins
    ours = {place: n for place, n in python.items() if _OURS in short(place[0])}
    files = len({file for file, _, _ in ours})
    each = sum(ours.values()) / repeats
    whole = sum(python.values()) / repeats
    return f"Python calls a bucket: {whole:.0f}, of which {each:.0f} of torchcomp in {files} files"


def table(profiler: cProfile.Profile, lines: int) -> str:
    """Return the functions that take the most time, without what they call."""
    stream = io.StringIO()
    pstats.Stats(profiler, stream=stream).sort_stats("tottime").print_stats(lines)
    return re.sub(r"\n\n+", "\n", short(stream.getvalue())).strip("\n")


def short(text: str) -> str:
    """Return `text` with paths that begin at the project, or at an installed package."""
    return re.sub(r"\S*/lib/python3\.\d+/(\S*-packages/)?", "", text).replace(f"{_ROOT}/", "")


if __name__ == "__main__":
    main()
