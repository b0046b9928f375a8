"""Wall-clock time of whole runs on hosts that are joined by links of 100 Mbit/s.

It needs root, iproute2 and gcc. It repeats the runs of ``large_batch.py`` with one seed, each
method at the learning rate selected in the ``large_batch.csv`` of the same folder. The hosts are
network namespaces with shaped links (benchmarks/net).
"""

import argparse
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.net.hosts import Hosts
from benchmarks.net.launch import LaunchError, lines_of
from benchmarks.net.shell import ShellError
from recipes.errors import RecipeError
from recipes.experiments import ResultTable
from recipes.jointspar.large_batch import RANKS, Run, Task, task_of, train_one
from recipes.jointspar.methods import parse_method
from recipes.jointspar.tables import contenders_of

MBIT, DELAY_US = 100, 500
_PORT = 29510
_TIMEOUT = 900
OUTCOME = ("lr", "mbit", "delay_us", "ranks", "bytes_share", "step_ms", "backward_ms", "seconds")


def open_wall_clock(arguments: argparse.Namespace) -> Callable[[], None]:
    """Return what measures the missing methods."""
    runs_path, task = arguments.out / "large_batch.csv", str(task_of(arguments))
    if not runs_path.is_file() and "large_batch" not in arguments.only:
        raise RecipeError(
            f"{runs_path} does not exist: run the part large_batch with this --out first"
        )
    if arguments.steps is not None:
        task += f", {arguments.steps} steps"
    task += f", {arguments.mbit} Mbit/s, {arguments.delay_us} us"
    path, run = arguments.out / "wall_clock.csv", ("method", "optimizer")
    table = ResultTable(path, run, OUTCOME, task, resume=arguments.resume)

    def measure() -> None:
        # Turn SIGTERM into an exception, so that every finally block removes its hosts.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        # Budgets of 75 and 90 % would save little time.
        lrs = {
            (each.method, each.optimizer): each.lr
            for each in contenders_of(arguments.out)
            if parse_method(each.method).budget not in (0.75, 0.9)
        }
        try:
            _measure(arguments, table, lrs)
        except (ShellError, LaunchError) as error:
            raise RecipeError(str(error)) from None

    return measure


def _measure(
    arguments: argparse.Namespace, table: ResultTable, lrs: dict[tuple[str, str], float]
) -> None:
    """Train every missing method on one host per rank, and add its times to the table."""
    if not (missing := table.missing(lrs)):
        return
    runs = json.dumps([[*each, lrs[each]] for each in missing])
    steps = [] if arguments.steps is None else [f"--steps={arguments.steps}"]
    program = [sys.executable, "-m", "recipes.jointspar.wall_clock", "--runs", runs, *steps]
    program += ["--quick"] * arguments.quick
    with Hosts(RANKS, arguments.mbit, arguments.delay_us) as hosts:
        commands = [
            [*hosts.inside(rank), *program, "--rank", str(rank), "--address", hosts.address(0)]
            for rank in range(RANKS)
        ]
        link = (arguments.mbit, arguments.delay_us, RANKS)
        lines = lines_of(commands, hosts.interface, _TIMEOUT)
        for each, line in zip(missing, lines, strict=True):
            measured = [line[name] for name in OUTCOME[4:]]
            table.add(each, (lrs[each], *link, *measured))


def work() -> None:
    """Train all runs as one rank on a host. Rank 0 prints their outcomes, one line each."""
    parser = argparse.ArgumentParser()
    for name in ("rank", "address", "runs"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    store, rank = f"tcp://{arguments.address}:{_PORT}", int(arguments.rank)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    task = Task("digits", None, "mlp", epochs=6 if arguments.quick else 60)
    for method, optimizer, lr in json.loads(arguments.runs):
        run, unlogged = Run(method, optimizer, lr, 0), Run("", "", 0.0, 0)
        outcome = train_one(run, task, unlogged, Path(), arguments.steps)
        if rank == 0:
            print(json.dumps(asdict(outcome)), flush=True)
    # Rank 0 hosts the store, so it must not exit while another rank still uses it.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "--rank" in sys.argv:
        work()
    else:
        from recipes.jointspar.experiment import main

        main(["--only", "wall_clock", *sys.argv[1:]])
