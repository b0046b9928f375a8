"""Measure on a GPU what the methods cost: kernels, one bucket, and whole training steps.

    python -m benchmarks.gpu                     # writes benchmarks/results/gpu-<name>.csv
    python -m benchmarks.gpu --rehearse --out /tmp/rehearsal     # on the CPU, with tiny sizes

The most important measurements come first. What does not fit into `--minutes` is left out, and the
program says what that was. Each row is on disk as soon as it is measured. Training steps run on all
GPUs, everything else on the first.
"""

import argparse
import re
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.gpu import kernels, methods, training
from benchmarks.gpu.device import Device, described
from benchmarks.gpu.models import TASKS, TINY
from benchmarks.net.rows import Table

RESULTS = Path(__file__).parents[1] / "results"
COLUMNS = ["date", "revision", "device", "torch", "cuda", "triton", "seed", "command"]
COLUMNS += ["part", "model", "what", "n", "k", "form", "ranks", "gpu_ms", "gb_s", "floor_ms"]
COLUMNS += ["cpu_us", "launches", "waits", "waits_per_step"]
COLUMNS += ["steps", "step_ms", "step_ms_low", "step_ms_high", "hidden"]

PARTS = ("kernel", "method", "step")
Rows = Iterator[dict[str, Any]]


def main() -> None:
    options = parsed()
    if not options.ranks:
        sys.exit("there is no CUDA device here; --rehearse runs all of it on the CPU")
    options.deadline = time.monotonic() + 60 * options.minutes
    prepare(options)
    device = Device(options.kind)
    left_out, failed = [], []
    for name, stage in rehearsed(options) if options.rehearse else stages(options):
        if options.parts and name.partition(" ")[0] not in options.parts:
            continue
        if is_over(options):
            left_out.append(name)
            continue
        try:
            if name.startswith("step"):
                in_ranks(options, name)
            else:
                Run(options, device).take(name, stage(device), lambda: is_over(options))
        except Exception:
            # A model that does not fit into this GPU must not cost the other measurements.
            traceback.print_exc()
            failed.append(name)
    if left_out:
        print(f"left out after {options.minutes:g} minutes: {', '.join(left_out)}", flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=6.0, help="time for all of it")
    parser.add_argument("--out", type=Path, help="folder of the CSV file")
    parser.add_argument(
        "--ranks", type=int, help="ranks of the training steps; by default all GPUs"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="by default all")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny sizes")
    options = parser.parse_args()
    if options.rehearse and options.out is None:
        parser.error("--rehearse needs --out: what it measures is no result")
    options.out = options.out or RESULTS
    options.kind = "cpu" if options.rehearse else "cuda"
    options.ranks = options.ranks or (1 if options.rehearse else torch.cuda.device_count())
    options.command = shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]])
    return options


Stage = tuple[str, Callable[[Device], Rows]]


def stages(options: argparse.Namespace) -> list[Stage]:
    """All measurements, the most important first."""
    seed = options.seed

    def sizes(cases: list[tuple[int, float, str]]) -> Callable[[Device], Rows]:
        return lambda device: chain.from_iterable(
            kernels.measure(device, n, ratio, form, 30, seed) for n, ratio, form in cases
        )

    def bucket(ranks: int) -> Callable[[Device], Rows]:
        return lambda device: chain.from_iterable(
            methods.measure(device, spec, ranks, methods.BUCKET, 20, seed)
            for spec in methods.METHODS
        )

    def model(name: str) -> Callable[[Device], Rows]:
        return partial(training.measure, name=name, task=TASKS[name], seconds=3.0, seed=seed)

    large, small = 25_000_000, 1_000_000
    return [
        ("kernel n = 25e6, 1 %", sizes([(large, 0.01, "fast")])),
        ("method 8 ranks", bucket(8)),
        ("step resnet50", model("resnet50")),
        ("step vit_b_16", model("vit_b_16")),
        ("kernel other sizes", sizes([(small, 0.01, "fast"), (large, 0.001, "fast")])),
        ("method 64 ranks", bucket(64)),
        ("kernel in torch", sizes([(large, 0.01, "torch"), (small, 0.001, "fast")])),
    ]


def rehearsed(options: argparse.Namespace) -> list[Stage]:
    """The same with tiny sizes. As each number of ranks divides n, shards are equally long."""
    seed = options.seed
    specs = [spec.replace("0.01", "0.125") for spec in methods.METHODS]
    return [
        ("kernel", lambda d: kernels.measure(d, 5000, 0.01, "fast", 1, seed)),
        ("kernel in torch", lambda d: kernels.measure(d, 5000, 0.01, "torch", 1, seed)),
        (
            "method",
            lambda d: chain.from_iterable(
                methods.measure(d, spec, 8, 1 << 14, 1, seed) for spec in specs
            ),
        ),
        *[
            (f"step {name}", partial(training.measure, name=name, task=task, seconds=0, seed=seed))
            for name, task in TINY.items()
        ],
    ]


def prepare(options: argparse.Namespace) -> None:
    if options.rehearse:
        # More threads would wait for each other on a busy machine.
        torch.set_num_threads(1)
    else:
        torch.backends.cudnn.benchmark = True


def is_over(options: argparse.Namespace) -> bool:
    return time.monotonic() > options.deadline


# --- One process ----------------------------------------------------------------------------------


class Run:
    """Writes the rows of one process.

    Args:
        options: the command line.
        device: the device of the process.
    """

    def __init__(self, options: argparse.Namespace, device: Device) -> None:
        self.common = described(device, options.command, options.seed)
        name = "rehearsal" if options.rehearse else self.common["device"]
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        self.table = Table(options.out / f"gpu-{slug}.csv", COLUMNS)

    def take(self, name: str, rows: Rows, over: Callable[[], bool], writes: bool = True) -> None:
        """Write and print `rows` until the time is over."""
        for row in rows:
            if writes:
                self.table.add(self.common | row)
                shown = {k: v for k, v in row.items() if k not in ("part", "model", "what")}
                figures = ", ".join(f"{key} {value}" for key, value in shown.items())
                print(f"{name}: {row['what']}: {figures}", flush=True)
            if over():
                if writes:
                    print(f"{name}: the time is over", flush=True)
                return


def in_ranks(options: argparse.Namespace, name: str) -> None:
    """Run a stage on all ranks, each in a process of its own if there are several."""
    with tempfile.TemporaryDirectory() as folder:
        if options.ranks == 1:
            one_rank(0, folder, options, name)
        else:
            # The stage is found by its name again: functions of stages() cannot be pickled.
            mp.spawn(one_rank, (folder, options, name), options.ranks)


def one_rank(rank: int, folder: str, options: argparse.Namespace, name: str) -> None:
    prepare(options)
    device = Device(options.kind, rank)
    dist.init_process_group(
        "gloo" if options.rehearse else "nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=options.ranks,
        timeout=timedelta(minutes=2),
    )
    stage = dict(rehearsed(options) if options.rehearse else stages(options))[name]

    def over() -> bool:
        # The ranks must agree, because the next row takes collectives.
        flag = torch.tensor([float(is_over(options))], device=device.place)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    try:
        Run(options, device).take(name, stage(device), over, writes=rank == 0)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
