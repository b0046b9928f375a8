"""Measure on a GPU what the methods cost: kernels, one bucket, and whole training steps.

    python -m benchmarks.gpu                     # writes benchmarks/results/gpu-<name>.csv
    python -m benchmarks.gpu --rehearse --out FOLDER     # on the CPU, with tiny sizes

The most important measurements come first. What does not fit into `--minutes` is left out, and the
program says what that was. Each row is on disk as soon as it is measured. Training steps run on all
GPUs, everything else on the first. The program ends with two tables: each method's step over that
of plain DDP, and its time on the host for a bucket. `python -m benchmarks.gpu.profile` shows what
the host does in that time.
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.gpu import kernels, methods, summary, training
from benchmarks.gpu.device import Device, described
from benchmarks.gpu.models import TASKS, TINY, Task
from benchmarks.net.names import BASELINES
from benchmarks.net.rows import Table

RESULTS = Path(__file__).parents[1] / "results"
COLUMNS = ["date", "revision", "device", "torch", "cuda", "triton", "seed", "command"]
COLUMNS += ["part", "model", "what", "n", "k", "form", "ranks", "gpu_ms", "gb_s", "floor_ms"]
COLUMNS += ["cpu_us", "launches", "waits", "waits_per_step"]
COLUMNS += ["steps", "step_ms", "step_ms_low", "step_ms_high", "hidden"]

PARTS = ("kernel", "method", "host", "step")
Rows = Iterator[dict[str, Any]]


def main() -> None:
    options = parsed()
    if not options.ranks:
        sys.exit("there is no CUDA device here; --rehearse runs all of it on the CPU")
    options.deadline = time.monotonic() + 60 * options.minutes
    prepare(options)
    device = Device(options.kind)
    run = Run(options, device)
    rows_before = len(run.table.read())
    left_out, failed = [], []
    for name, stage in stages(options):
        if options.parts and name.partition(" ")[0] not in options.parts:
            continue
        if is_over(options):
            left_out.append(name)
            continue
        try:
            if name.startswith("step"):
                in_ranks(options, name)
            else:
                run.take(name, stage(device), lambda: is_over(options))
        except Exception:
            # A model that does not fit into this GPU must not cost the other measurements.
            traceback.print_exc()
            failed.append(name)
    print(summary.text(run.table.read()[rows_before:]), end="", flush=True)
    if left_out:
        print(f"left out after {options.minutes:g} minutes: {'; '.join(left_out)}", flush=True)
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
    large, small = 25_000_000, 1_000_000
    if options.rehearse:
        return [
            *vectors([(5000, 0.01, "fast"), (5000, 0.01, "torch")], 1, options.seed),
            # The ranks divide what is kept, as they do with the real sizes.
            *buckets(8, 1 << 14, "0.125", 1, options.seed),
            *hosts(8, 1 << 14, "0.125", 1, options.seed),
            *models(TINY, 0.0, options.seed),
        ]
    return [
        *vectors([(large, 0.01, "fast")], 30, options.seed),
        *buckets(8, methods.BUCKET, "0.01", 20, options.seed),
        *hosts(8, methods.BUCKET, "0.01", 50, options.seed),
        *models(TASKS, 1.5, options.seed),
        *vectors([(small, 0.01, "fast"), (large, 0.001, "fast")], 30, options.seed),
        *buckets(64, methods.BUCKET, "0.01", 20, options.seed),
        *vectors([(large, 0.01, "torch"), (small, 0.001, "fast")], 30, options.seed),
    ]


def vectors(cases: list[tuple[int, float, str]], repeats: int, seed: int) -> list[Stage]:
    """The kernels on vectors of n entries, of which a share is kept, in one form."""
    return [
        (
            f"kernel n = {n:,}, {ratio:.1%}, {form}",
            partial(kernels.measure, n=n, ratio=ratio, form=form, repeats=repeats, seed=seed),
        )
        for n, ratio, form in cases
    ]


def buckets(ranks: int, n: int, ratio: str, repeats: int, seed: int) -> list[Stage]:
    """Every method on a bucket of n entries, of which it keeps the share `ratio`."""
    specs = [spec.replace("0.01", ratio) for spec in methods.METHODS]
    size = {"world_size": ranks, "n": n, "repeats": repeats, "seed": seed}
    return [
        (f"method {ranks} ranks {spec}", partial(methods.measure, spec=spec, **size))
        for spec in specs
    ]


def hosts(ranks: int, n: int, ratio: str, repeats: int, seed: int) -> list[Stage]:
    """The host's time for a bucket, with every method of torchcomp that also trains."""
    specs = [spec for spec in training.METHODS if spec not in BASELINES]
    size = {"world_size": ranks, "n": n, "repeats": repeats, "seed": seed}
    return [
        (f"host {ranks} ranks {spec}", partial(methods.measure_host, spec=spec, **size))
        for spec in (each.replace("0.01", ratio) for each in specs)
    ]


def models(tasks: dict[str, Task], seconds: float, seed: int) -> list[Stage]:
    """Training steps of each model, with every method."""
    return [
        (
            f"step {name}",
            partial(training.measure, name=name, task=task, seconds=seconds, seed=seed),
        )
        for name, task in tasks.items()
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
    stage = dict(stages(options))[name]

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
