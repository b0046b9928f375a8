"""Bidirectional TopK: its counterexample, and traffic and accuracy of 2 to 100 workers.

    python -m recipes.bidirectional_topk.experiment
    python -m recipes.bidirectional_topk.experiment --quick
    python -m recipes.bidirectional_topk.experiment --resume
    python -m recipes.bidirectional_topk.experiment --only downlink accuracy
    python -m recipes.bidirectional_topk.experiment --dataset mnist --data FOLDER

The experiments are those of Zou's thesis (2022). The whole takes half an hour on two cores. The
parts are

* counterexample: three quadratics on three processes over gloo (``counterexample.py``). The exit
  status is 1 if a number differs from the thesis's.
* downlink: the union of the workers' supports, and the bytes that a rank receives.
* accuracy: test accuracy of dense, uni- and bidirectional training.

The last two simulate N workers in one process (``simulation.py``), with batches of 10 and K = 0.001
d. Each part writes its tables as CSV files and draws a picture from them.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from recipes.bidirectional_topk import accuracy, counterexample, downlink, pictures
from recipes.bidirectional_topk.accuracy import AccuracySize
from recipes.bidirectional_topk.problems import DATASETS, MODELS, open_problem
from recipes.errors import exit_on_user_error
from recipes.experiments import ExperimentParser, ResultTable
from recipes.result_files import make_folder
from torchcomp.checks import check_count

PARTS = ("counterexample", "downlink", "accuracy")
_HERE = Path(__file__).resolve().parent
_Cells = list[object]


@dataclass(frozen=True)
class ExperimentSize:
    """The amount of work of each part."""

    lrs: tuple[float, ...]
    workers: tuple[int, ...]
    union_steps: int
    accuracy: AccuracySize


WHOLE = ExperimentSize(
    lrs=counterexample.LRS,
    workers=(2, 5, 10, 20, 50, 100),
    union_steps=8,
    accuracy=AccuracySize(workers=20, steps=200, lrs=(0.1, 0.3, 1.0, 3.0), seeds=5),
)
QUICK = ExperimentSize(
    lrs=counterexample.QUICK_LRS,
    workers=(2, 4, 8),
    union_steps=4,
    accuracy=AccuracySize(workers=4, steps=10, lrs=(0.1, 0.3), seeds=2),
)


@exit_on_user_error()
def main() -> None:
    """Run the parts, print and save their results; bad input ends in one line."""
    arguments = parse(sys.argv[1:])
    started = time.monotonic()
    size = QUICK if arguments.quick else WHOLE
    # All input is checked before any process starts and before any file is written.
    if arguments.only != ["counterexample"]:
        open_problem(arguments.dataset, arguments.models[0], arguments.data)
    tables = open_tables(arguments, size)
    make_folder(arguments.out)
    differing: list[str] = []
    if "counterexample" in tables:
        differing = run_counterexample(size, tables["counterexample"])
    run_workers(arguments, size, tables)
    print(f"tables and pictures are in {arguments.out}")
    print(f"total time: {time.monotonic() - started:.0f} s")
    if differing:
        sys.exit("error: these numbers differ from the thesis's:\n  " + "\n  ".join(differing))


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = ExperimentParser(__doc__.splitlines()[0], _HERE, PARTS)
    parser.add_argument("--dataset", choices=DATASETS, default="digits", help="[digits]")
    parser.add_argument("--data", type=Path, help="folder of the data set; digits needs none")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="[all]")
    parser.add_argument("--processes", type=int, default=2, help="measurements at a time [2]")
    parsed = parser.parse_args(words)
    check_count("--processes", parsed.processes)
    # A model or part that is named twice runs once.
    parsed.models = list(dict.fromkeys(parsed.models))
    parsed.only = list(dict.fromkeys(parsed.only or PARTS))
    # The committed results are of the digits.
    parsed.out = parser.output_folder(parsed, published=parsed.dataset == "digits")
    return parsed


def open_tables(arguments: argparse.Namespace, size: ExperimentSize) -> dict[str, ResultTable]:
    """Open the table of each part, with the finished rows if the run is resumed."""
    columns_and_tasks = {
        "counterexample": (counterexample.COLUMNS, counterexample.TASK),
        "downlink": (downlink.COLUMNS, downlink.task(arguments.dataset, size.union_steps)),
        "accuracy": (accuracy.COLUMNS, size.accuracy.task(arguments.dataset)),
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
    print(f"{counterexample.thesis_table(table.rows)}\n\n{counterexample.scan_table(table.rows)}\n")
    pictures.draw_counterexample(table.path.parent)
    differing = counterexample.differences(table.rows)
    if not differing:
        print("every number is the thesis's, to its last printed digit\n", flush=True)
    return differing


def run_workers(
    arguments: argparse.Namespace, size: ExperimentSize, tables: dict[str, ResultTable]
) -> None:
    """Measure downlink and accuracy on a pool of processes; print and draw the results."""
    # Spawned processes read it when they import torch, so it must be set before the pool starts.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    pool = ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn"))
    try:
        pending = submit(pool, arguments, size, tables)
        for job in as_completed(pending):
            pending[job].add(job.result())
    finally:
        # After an error or Ctrl-C, do not start the queued measurements.
        pool.shutdown(cancel_futures=True)
    if "downlink" in tables:
        _finish(tables["downlink"], downlink.order_of)
        rows = [downlink.Downlink.of(row) for row in tables["downlink"].rows]
        print(f"\n{downlink.downlink_table(rows)}\n")
        pictures.draw_downlink(arguments.out)
    if "accuracy" in tables:
        _finish(tables["accuracy"], accuracy.order_of)
        print(f"\n{accuracy.accuracy_table(tables['accuracy'].rows)}\n")
        pictures.draw_accuracy(arguments.out)


def submit(
    pool: ProcessPoolExecutor,
    arguments: argparse.Namespace,
    size: ExperimentSize,
    tables: dict[str, ResultTable],
) -> dict["Future[_Cells]", ResultTable]:
    """Submit the measurements that the tables lack, the longest of each kind first."""
    data = (arguments.dataset, arguments.data)
    pending: dict[Future[_Cells], ResultTable] = {}
    if (table := tables.get("downlink")) is not None:
        for measurement in missing_downlinks(arguments.models, size, table):
            pending[pool.submit(_downlink, *data, *measurement, size.union_steps)] = table
    if (table := tables.get("accuracy")) is not None:
        for model, method in missing_accuracies(arguments.models, table):
            pending[pool.submit(_accuracy, *data, model, method, size.accuracy)] = table
    return pending


def missing_downlinks(
    models: list[str], size: ExperimentSize, table: ResultTable
) -> list[tuple[str, str, str, int]]:
    """Return the model, phase, method and number of workers of each missing row."""
    finished = {downlink.order_of(row) for row in table.rows}
    wanted = [
        (model, phase, method, count)
        for count in reversed(size.workers)
        for model in models
        for phase in downlink.PHASES
        for method in downlink.WATCHED
    ]
    return [each for each in wanted if each not in finished]


def missing_accuracies(models: list[str], table: ResultTable) -> list[tuple[str, str]]:
    """Return the model and method of each missing row."""
    finished = {(row["model"], row["method"]) for row in table.rows}
    wanted = [(model, method) for method in reversed(accuracy.METHODS) for model in models]
    return [each for each in wanted if each not in finished]


def _downlink(
    dataset: str, data: Path | None, model: str, phase: str, method: str, count: int, steps: int
) -> _Cells:
    torch.set_num_threads(1)
    row = downlink.measure(open_problem(dataset, model, data), phase, method, count, steps)
    print(f"{model}, {phase}, {method}, N = {count}: union {row.union:.2f} K", flush=True)
    return row.cells()


def _accuracy(
    dataset: str, data: Path | None, model: str, method: str, size: AccuracySize
) -> _Cells:
    torch.set_num_threads(1)
    score = accuracy.compare(open_problem(dataset, model, data), method, size)
    print(f"{model}, {method}: {score.mean:.2f} % at lr {score.lr:g}", flush=True)
    return score.cells()


def _finish(table: ResultTable, order: Callable[[dict[str, str]], tuple[Any, ...]]) -> None:
    """Save the rows in the order of the table, instead of the order in which they finished."""
    table.rows.sort(key=order)
    table.save()


if __name__ == "__main__":
    main()
