"""Bidirectional TopK: its counterexample, and traffic and accuracy of 2 to 100 workers.

    python -m recipes.bidirectional_topk.experiment
    python -m recipes.bidirectional_topk.experiment --quick
    python -m recipes.bidirectional_topk.experiment --resume
    python -m recipes.bidirectional_topk.experiment --only union accuracy
    python -m recipes.bidirectional_topk.experiment --seeds 3,7,11
    python -m recipes.bidirectional_topk.experiment --dataset mnist --data FOLDER

The experiments are those of Zou's thesis (2022). The parts are

* counterexample: three quadratics on three processes over gloo (``counterexample.py``). The exit
  status is 1 if a number differs from the thesis's.
* union: the union of the workers' supports over whole runs, and the bytes that a rank receives.
* accuracy: test accuracy without compression, and with it in one direction or in both.
* lr_inside: test accuracy with the learning rate inside the residual and outside of it.

All but the first simulate N workers in one process (``serial.py``), with batches of 10 and, if not
said otherwise, K = 0.001 d. Each part writes its table as a CSV file and draws a picture from it.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import torch

from recipes.bidirectional_topk import (
    accuracy,
    counterexample,
    lr_inside,
    pictures,
    runs,
    tables,
    union,
)
from recipes.bidirectional_topk.accuracy import AccuracySize
from recipes.bidirectional_topk.lr_inside import LrInsideSize
from recipes.bidirectional_topk.problems import DATASETS, Problem, open_problem
from recipes.bidirectional_topk.runs import Run
from recipes.bidirectional_topk.union import UnionSize
from recipes.errors import exit_on_user_error
from recipes.experiments import ExperimentParser, ResultTable, tuning_seeds
from recipes.result_files import make_folder
from torchcomp.checks import check_count

PARTS = ("counterexample", "union", "accuracy", "lr_inside")
_HERE = Path(__file__).resolve().parent
_Measure = Callable[[Run, Problem], list[object]]


@dataclass(frozen=True)
class ExperimentSize:
    """The amount of work of each part."""

    lrs: tuple[float, ...]
    union: UnionSize
    accuracy: AccuracySize
    lr_inside: LrInsideSize


WHOLE = ExperimentSize(counterexample.LRS, UnionSize(), AccuracySize(), LrInsideSize())
QUICK = ExperimentSize(
    lrs=counterexample.QUICK_LRS,
    union=UnionSize(
        seeds=2,
        varied_seeds=1,
        # A fifth of them is a whole number of windows.
        steps=125,
        workers=(2, 4, 8),
        other_workers=(2, 4),
        ratio_workers=(4,),
        ratios=(0.003,),
        lr_workers=4,
        lrs=(0.1,),
        long_workers=2,
        long_steps=150,
    ),
    accuracy=AccuracySize(cases=(("mlp", 4), ("cnn", 4)), lrs=(0.1, 0.3), steps=20, tuning_seeds=1),
    lr_inside=LrInsideSize(workers=4, steps=20, lrs=(0.3,), tuning_seeds=1),
)


@exit_on_user_error()
def main() -> None:
    """Run the parts, print and save their results; bad input ends in one line."""
    arguments = parse(sys.argv[1:])
    started = time.monotonic()
    size = QUICK if arguments.quick else WHOLE
    # All input is checked before any process starts and before any file is written.
    if arguments.only != ["counterexample"]:
        open_problem(arguments.dataset, "mlp", arguments.data)
    parts = open_tables(arguments, size)
    make_folder(arguments.out)
    differing: list[str] = []
    if "counterexample" in parts:
        differing = run_counterexample(size, parts["counterexample"])
    run_workers(arguments, size, parts)
    if "lr_inside" in parts:
        run_lr_inside(arguments, size, parts["lr_inside"])
    print(f"tables and pictures are in {arguments.out}")
    print(f"total time: {time.monotonic() - started:.0f} s")
    if differing:
        sys.exit("error: these numbers differ from the thesis's:\n  " + "\n  ".join(differing))


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = ExperimentParser(__doc__.splitlines()[0], _HERE, PARTS, seeds=lr_inside.SEEDS)
    names = ", ".join(DATASETS)
    parser.add_argument(
        "--dataset", choices=DATASETS, default="digits", metavar="NAME", help=f"{names} [digits]"
    )
    parser.add_argument("--data", type=Path, help="folder of the data set; digits needs none")
    parser.add_argument("--processes", type=int, default=2, help="measurements at a time [2]")
    parsed = parser.read(words)
    check_count("--processes", parsed.processes)
    # The committed results are of the digits.
    parsed.out = parser.output_folder(parsed, published=parsed.dataset == "digits")
    return parsed


def open_tables(arguments: argparse.Namespace, size: ExperimentSize) -> dict[str, ResultTable]:
    """Open the table of each part, with the finished rows if the run is resumed."""
    columns_and_tasks = {
        "counterexample": (counterexample.COLUMNS, counterexample.TASK),
        "union": (union.COLUMNS, size.union.task(arguments.dataset)),
        "accuracy": (accuracy.COLUMNS, size.accuracy.task(arguments.dataset)),
        "lr_inside": (lr_inside.COLUMNS, size.lr_inside.task(arguments.dataset)),
    }
    return {
        part: ResultTable(
            arguments.out / f"{part}.csv", *columns_and_tasks[part], resume=arguments.resume
        )
        for part in arguments.only
    }


def run_counterexample(size: ExperimentSize, table: ResultTable) -> list[str]:
    """Train the quadratics; return the numbers that differ from the thesis's."""
    counterexample.run(size.lrs, table)
    _show(table.path.parent, "counterexample_values", "counterexample_scan")
    pictures.draw_counterexample(table.path.parent)
    differing = counterexample.differences(table.rows)
    if not differing:
        print("every number is the thesis's, to its last printed digit\n", flush=True)
    return differing


def run_workers(
    arguments: argparse.Namespace, size: ExperimentSize, parts: dict[str, ResultTable]
) -> None:
    """Measure unions and accuracies on a pool of processes; print and draw the results."""
    # Spawned processes read it when they import torch, so it must be set before the pool starts.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    pool = ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn"))
    dataset, data, seeds = arguments.dataset, arguments.data, arguments.seeds
    try:
        if (table := parts.get("union")) is not None:
            _measure_missing(pool, union.measure, size.union.runs(dataset, seeds), data, table)
            _show(arguments.out, "unions", "savings", "growths", "variations", "traffic")
            pictures.draw_union(arguments.out)
        if (table := parts.get("accuracy")) is not None:
            tuning = tuning_seeds(seeds, size.accuracy.tuning_seeds)
            for case in size.accuracy.cases:
                tried = size.accuracy.tuning_runs(dataset, case, tuning)
                _measure_missing(pool, accuracy.measure, tried, data, table)
                tested = size.accuracy.test_runs(dataset, case, seeds, table.rows)
                _measure_missing(pool, accuracy.measure, tested, data, table)
            _show(arguments.out, "accuracy", "differences")
            pictures.draw_accuracy(arguments.out)
    finally:
        # After an error or Ctrl-C, do not start the queued measurements.
        pool.shutdown(cancel_futures=True)


def run_lr_inside(arguments: argparse.Namespace, size: ExperimentSize, table: ResultTable) -> None:
    """Compare both places of the learning rate, one run after another."""
    torch.set_num_threads(1)
    problem = open_problem(arguments.dataset, lr_inside.MODEL, arguments.data)
    tuning = tuning_seeds(arguments.seeds, size.lr_inside.tuning_seeds)
    lr_inside.measure(problem, size.lr_inside, table, arguments.seeds, tuning)
    _show(arguments.out, "lr_inside")


def _measure_missing(
    pool: ProcessPoolExecutor,
    measure: _Measure,
    wanted: Sequence[Run],
    data: Path | None,
    table: ResultTable,
) -> None:
    pending = {
        pool.submit(_row, measure, run, data): run for run in runs.missing(wanted, table.rows)
    }
    for job in as_completed(pending):
        table.add(job.result())
        run = pending[job]
        print(
            f"{table.path.stem}: {run.dataset}, {run.model}, {run.method}, N = {run.workers}, "
            f"K = {run.ratio:g} d, lr {run.lr:g}, seed {run.seed}: "
            f"{float(table.rows[-1]['accuracy']):.2f} % of {run.images} images",
            flush=True,
        )
    # In the order of the settings, instead of the order in which the runs finished.
    table.rows.sort(key=Run.of)
    table.save()


def _show(folder: Path, *names: str) -> None:
    for name in names:
        print(f"\n{tables.TABLES[name](folder)}", flush=True)


def _row(measure: _Measure, run: Run, data: Path | None) -> list[object]:
    torch.set_num_threads(1)
    return measure(run, _problem(run.dataset, run.model, data))


# A process measures many runs of the same problem.
_problem = cache(open_problem)


if __name__ == "__main__":
    main()
