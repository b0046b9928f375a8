"""Wall-clock time of whole runs of ``large_batch.py`` on two hosts joined by 100 Mbit/s.

It needs root, iproute2 and gcc: the hosts are network namespaces with shaped links. Every method
trains once, at the learning rate that ``large_batch.csv`` in the same folder selects.
"""

import argparse
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict

import torch
import torch.distributed as dist

from benchmarks.net.hosts import Hosts
from benchmarks.net.launch import LaunchError, lines_of
from benchmarks.net.shell import ShellError, missing
from recipes.errors import RecipeError
from recipes.experiments import ResultTable
from recipes.jointspar.large_batch import RANKS, Run, Setting, epochs_and_task, train_one
from recipes.jointspar.tables import contenders_of
from recipes.rows import cells, columns

MBIT, DELAY_US = 100, 500
OUTCOME = ("bytes_share", "step_ms", "seconds")
_PORT, _TIMEOUT = 29510, 900
# Budgets of 75 and 90 % would save little time.
_NOT_TIMED = (0.75, 0.9)


def open_wall_clock(arguments: argparse.Namespace) -> Callable[[], None]:
    if lacking := missing():
        raise RecipeError(f"wall_clock cannot run: {lacking}. --only chooses other parts")
    if "large_batch" not in arguments.only and not (arguments.out / "large_batch.csv").exists():
        raise RecipeError(
            f"wall_clock needs large_batch.csv in {arguments.out}: run that part first"
        )
    epochs, task = epochs_and_task(arguments)
    task += f", {MBIT} Mbit/s, {DELAY_US} us"
    path = arguments.out / "wall_clock.csv"
    table = ResultTable(path, columns(Setting), OUTCOME, task, resume=arguments.resume)

    def measure() -> None:
        timed = [
            Setting(each.method, each.optimizer, each.lr)
            for each in contenders_of(arguments.out)
            if each.budget not in _NOT_TIMED
        ]
        # As an exception, SIGTERM lets every finally block remove its hosts.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            _measure(table, table.missing(timed), epochs)
        except (ShellError, LaunchError) as error:
            raise RecipeError(str(error)) from None

    return measure


def _measure(table: ResultTable, runs: list[Setting], epochs: int) -> None:
    """Train every method on one host per rank, and add its times to the table."""
    if not runs:
        return
    program = [
        sys.executable,
        "-m",
        __name__,
        json.dumps([cells(run) for run in runs]),
        str(epochs),
    ]
    with Hosts(RANKS, MBIT, DELAY_US) as hosts:
        commands = [
            [*hosts.inside(rank), *program, str(rank), hosts.address(0)] for rank in range(RANKS)
        ]
        lines = lines_of(commands, hosts.interface, _TIMEOUT)
        for run, line in zip(runs, lines, strict=True):
            table.add(run, [line[name] for name in OUTCOME])


def main() -> None:
    """Train all runs as one rank. Rank 0 prints their outcomes, one line each."""
    runs, epochs, rank, address = sys.argv[1:]
    torch.set_num_threads(1)
    store = f"tcp://{address}:{_PORT}"
    dist.init_process_group("gloo", init_method=store, rank=int(rank), world_size=RANKS)
    for run in json.loads(runs):
        outcome = train_one(Run(*run, seed=0), int(epochs))
        if rank == "0":
            print(json.dumps(asdict(outcome)), flush=True)
    # Rank 0 hosts the store, so it must not exit while another rank still uses it.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
