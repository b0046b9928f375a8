"""What a compressed downlink saves as workers are added, and what it costs in accuracy.

    python -m recipes.bidirectional_topk.workers              # half an hour on two cores
    python -m recipes.bidirectional_topk.workers --quick      # half a minute, to see that it works
    python -m recipes.bidirectional_topk.workers --dataset mnist --data FOLDER

N workers with batches of 10, synchronised at every batch, are simulated in one process by
torchcomp's own aggregators (``simulation.py``); K is 0.001 d. Writes ``downlink.csv``,
``accuracy.csv`` and their plots to ``--out``. The experiments are those of Zou's thesis (2022).
"""

import argparse
import os
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from recipes.bidirectional_topk.accuracy import METHODS, Score, compare
from recipes.bidirectional_topk.downlink import PHASES, PUBLISHED, WATCHED, Downlink, measure
from recipes.bidirectional_topk.pictures import by_model, draw_accuracy, draw_downlink, line
from recipes.bidirectional_topk.problems import DATASETS, MODELS, open_problem
from recipes.errors import told_in_one_line
from recipes.result_files import make_folder, write_csv
from torchcomp.checks import check_count

_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Size:
    """How much is run."""

    workers: tuple[int, ...] = (2, 5, 10, 20, 50, 100)
    union_steps: int = 8
    accuracy_workers: int = 20
    accuracy_steps: int = 200
    rates: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)
    seeds: int = 5


QUICK = Size((2, 4, 8), 4, 4, 10, (0.1, 0.3), 2)


@told_in_one_line()
def main() -> None:
    """Measure, show and write; bad input ends in one line."""
    arguments = parse(sys.argv[1:])
    size = QUICK if arguments.quick else Size()
    started = time.monotonic()
    # Here first, so that a path that cannot be used is told before any process starts.
    open_problem(arguments.dataset, arguments.models[0], arguments.data)
    make_folder(arguments.out)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        pending_rows, pending_scores = submit(pool, arguments, size)
        if pending_rows:
            save_downlink([job.result() for job in pending_rows], arguments.out)
        if pending_scores:
            save_accuracy([job.result() for job in pending_scores], arguments.out)
    print(f"tables and pictures are in {arguments.out}")
    print(f"all together: {time.monotonic() - started:.0f} s")


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="few workers, steps and seeds")
    parser.add_argument("--dataset", choices=DATASETS, default="digits")
    parser.add_argument("--data", type=Path, help="folder of the data set; digits needs none")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--only", choices=("downlink", "accuracy"), help="one of the two parts")
    parser.add_argument("--processes", type=int, default=2, help="measurements at a time [2]")
    parser.add_argument("--out", type=Path, help="folder of the files [results; quick: runs]")
    parsed = parser.parse_args(words)
    # A model that is named twice is measured once.
    parsed.models = list(dict.fromkeys(parsed.models))
    check_count("--processes", parsed.processes)
    if parsed.out is None:
        # The repository's results are of the digits; nothing else may overwrite them by default.
        whole = parsed.dataset == "digits" and not parsed.quick
        parsed.out = _HERE / "results" if whole else Path("runs/bidirectional_topk")
    return parsed


def submit(
    pool: ProcessPoolExecutor, arguments: argparse.Namespace, size: Size
) -> tuple[list["Future[Downlink]"], list["Future[Score]"]]:
    """Hand all measurements to the processes, the longest of each kind first."""
    where = (arguments.dataset, arguments.data)
    rows = [
        pool.submit(_downlink, *where, model, phase, method, count, size.union_steps)
        for count in reversed(size.workers)
        for model in arguments.models
        for phase in PHASES
        for method in WATCHED
        if arguments.only != "accuracy"
    ]
    scores = [
        pool.submit(_score, *where, model, method, size)
        for method in reversed(METHODS)
        for model in arguments.models
        if arguments.only != "downlink"
    ]
    return rows, scores


def _score(dataset: str, data: Path | None, model: str, method: str, size: Size) -> Score:
    torch.set_num_threads(1)
    problem = open_problem(dataset, model, data)
    count, steps = size.accuracy_workers, size.accuracy_steps
    score = compare(problem, method, count, steps, size.rates, size.seeds)
    print(f"{model}, {method}: {score.mean:.2f} % at lr {score.lr:g}", flush=True)
    return score


def _downlink(
    dataset: str, data: Path | None, model: str, phase: str, method: str, count: int, steps: int
) -> Downlink:
    torch.set_num_threads(1)
    row = measure(open_problem(dataset, model, data), phase, method, count, steps)
    print(f"{model}, {phase}, {method}, N = {count}: union {row.union:.2f} K", flush=True)
    return row


def downlink_table(rows: list[Downlink]) -> str:
    """Return unions and savings as text, with the line through the savings."""
    lines = [f"{'':<30}{'N':>4}{'union/K':>9}{'random':>8}{'thesis':>8}{'union B':>9}{'K B':>6}"]
    lines[0] += f"{'saving':>8}"
    for row in rows:
        published = str(PUBLISHED.get(row.workers, "-"))
        lines.append(
            f"{f'{row.model}, {row.phase}, {row.method}':<30}{row.workers:>4}{row.union:>9.2f}"
            f"{row.random_union:>8.2f}{published:>8}{row.union_bytes:>9,}{row.answer_bytes:>6}"
            f"{row.saving:>7.2f}x"
        )
    for name, held in by_model(rows, "bidirectional").items():
        slope, intercept, fit = line(held)
        lines.append(f"{name}: saving = {intercept:.2f} + {slope:.3f} N, R^2 = {fit:.4f}")
    return "\n".join(lines)


def accuracy_table(scores: list[Score]) -> str:
    """Return the accuracies as text."""
    lines = [f"{'':<21}{'lr':>6}{'accuracy, %':>16}   late union/K"]
    for score in scores:
        edge = "  (rate at the edge of the grid)" if score.at_edge else ""
        union = f"{score.union:.2f}" if score.union else "-"
        lines.append(
            f"{score.model + ', ' + score.method:<21}{score.lr:>6g}"
            f"{score.mean:>9.2f} ± {score.deviation:.2f}   {union:>6}{edge}"
        )
    return "\n".join(lines)


def save_downlink(rows: list[Downlink], folder: Path) -> None:
    """Show and write unions and bytes."""
    rows = sorted(rows, key=lambda row: (row.model, row.phase, row.method, row.workers))
    print(f"\n{downlink_table(rows)}\n", flush=True)
    cells = [row.cells() for row in rows]
    write_csv(folder / "downlink.csv", list(cells[0]), [list(row.values()) for row in cells])
    draw_downlink(rows, folder / "downlink.png")


def save_accuracy(scores: list[Score], folder: Path) -> None:
    """Show and write accuracies, with every seed's, and what the rates were chosen by."""
    scores = sorted(scores, key=lambda score: (score.model, list(METHODS).index(score.method)))
    print(f"\n{accuracy_table(scores)}\n")
    header = ["dataset", "model", "method", "workers", "steps", "lr", "mean", "deviation"]
    header += ["late_union", "by_seed", "validation_by_lr"]
    write_csv(folder / "accuracy.csv", header, [_score_cells(score) for score in scores])
    draw_accuracy(scores, folder / "accuracy.png")


def _score_cells(score: Score) -> list[object]:
    return [
        *(score.dataset, score.model, score.method, score.workers, score.steps, score.lr),
        *(f"{score.mean:.3f}", f"{score.deviation:.3f}", f"{score.union:.3f}"),
        " ".join(f"{accuracy:.2f}" for accuracy in score.accuracies),
        " ".join(f"{lr:g}:{accuracy:.2f}" for lr, accuracy in score.tuning.items()),
    ]


if __name__ == "__main__":
    main()
