"""Convergence of the paper's algorithm and of ours, with linear scaling, SGD and LARS.

    python -m recipes.jointspar.convergence
    python -m recipes.jointspar.convergence --quick
    python -m recipes.jointspar.convergence --workers 4 --optimizers sgd \\
        --methods 'jointspar(0.6, selection="per-rank", rule=Literal(alpha=1e-8))'

Takes a quarter of an hour on two cores. Each run simulates its ranks in one process
(simulation.py). The batch of a worker is fixed, so the whole batch and the learning rate grow with
the number of workers. Held-out images and seeds that are not reported choose the learning rate of
each method and optimizer. Every method is then trained with its own learning rate and with that of
dense training. Writes ``convergence_tuning.csv``, ``convergence.csv``, ``convergence_curves.csv``
and a picture for each optimizer.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

import torch

from recipes.errors import RecipeError, exit_on_user_error
from recipes.experiments import ResultTable, tuning_seeds
from recipes.jointspar.convergence_drawing import draw_convergence
from recipes.jointspar.convergence_runs import (
    BATCH,
    OUTCOME_COLUMNS,
    RUN_COLUMNS,
    SimulatedRun,
    Trajectory,
    simulate,
    steps_per_epoch,
)
from recipes.jointspar.convergence_summary import DENSE, OURS, PAPER, PAPERS_RULE, chosen_lrs
from recipes.jointspar.methods import LayerSampling, parse_method
from recipes.jointspar.parts import part_parser
from recipes.jointspar.simulation import check_simulated
from recipes.result_files import make_folder
from torchcomp.checks import check_count

OPTIMIZERS = ("sgd", "lars")


@dataclass(frozen=True)
class ConvergenceSize:
    """The length and the number of the runs.

    Attributes:
        epochs: epochs of a run.
        workers: numbers of simulated ranks.
        lrs: for each optimizer, the peak learning rates of one worker that every method tries.
    """

    epochs: int
    workers: tuple[int, ...]
    lrs: Mapping[str, tuple[float, ...]]

    @property
    def task(self) -> str:
        """The settings that all rows share."""
        return f"digits, residual MLP of 10 layers, {self.epochs} epochs, {BATCH} images per worker"


WHOLE = ConvergenceSize(
    epochs=30,
    workers=(2, 4, 8),
    lrs={"sgd": (0.003125, 0.00625, 0.0125, 0.025, 0.05), "lars": (0.025, 0.05, 0.1, 0.2)},
)
QUICK = ConvergenceSize(epochs=3, workers=(4,), lrs={"sgd": (0.0125,), "lars": (0.1,)})


def default_methods() -> tuple[str, ...]:
    """Return dense training, the paper's algorithm, and its variants."""
    sampled = [
        LayerSampling(0.6, rule=PAPERS_RULE),
        LayerSampling(0.6, rule=None),
        LayerSampling(0.3, selection="per-rank", rule=PAPERS_RULE),
        LayerSampling(0.3, "bytes"),
    ]
    return DENSE, PAPER, OURS, *map(str, sampled)


@exit_on_user_error()
def main() -> None:
    """Train the missing runs, print the learning rates, and draw the pictures."""
    arguments = parse(sys.argv[1:])
    tuning = open_table(arguments, "convergence_tuning")
    table, curves = open_table(arguments), open_curves(arguments)
    make_folder(arguments.out)
    # The layers are small: threads within a run would only wait for each other.
    torch.set_num_threads(1)
    planned = list(tuning_runs(arguments))
    train_missing(planned, arguments, tuning)
    # A resumed table can have more: other workers, or a tuning seed that is reported now.
    chosen = chosen_lrs([row for row in tuning.rows if SimulatedRun.of(row) in planned])
    for (optimizer, method), lr in chosen.items():
        print(f"{optimizer}, {method}: lr {lr:g} per worker")
    train_missing(reported_runs(arguments, chosen), arguments, table, curves)
    for optimizer in arguments.optimizers:
        path = arguments.out / f"convergence_{optimizer}.png"
        draw_convergence(optimizer, curves.rows, chosen, path)


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = part_parser(__doc__)
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        help="compared with dense, such as 'jointspar(0.5)' [the six of the page]",
    )
    parser.add_argument(
        "--optimizers",
        nargs="+",
        metavar="NAME",
        choices=OPTIMIZERS,
        default=list(OPTIMIZERS),
        help=f"of {', '.join(OPTIMIZERS)} [both]",
    )
    parser.add_argument(
        "--workers",
        nargs="+",
        type=int,
        metavar="N",
        help="numbers of simulated ranks [2 4 8; with --quick: 4]",
    )
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count(), help="runs at a time [one per core]"
    )
    parsed = parser.read(words)
    parsed.size = QUICK if parsed.quick else WHOLE
    published = not (parsed.methods or parsed.workers) and parsed.optimizers == list(OPTIMIZERS)
    parsed.out = parser.output_folder(parsed, published=published)
    parsed.methods = _methods(parsed.methods)
    # A value that is named twice is run once.
    parsed.workers = list(dict.fromkeys(parsed.workers or parsed.size.workers))
    parsed.optimizers = list(dict.fromkeys(parsed.optimizers))
    check_count("--processes", parsed.processes)
    for workers in parsed.workers:
        check_count("--workers", workers)
        if not steps_per_epoch(workers):
            raise RecipeError(f"--workers {workers} x {BATCH} images: digits has too few images")
    return parsed


def _methods(texts: Sequence[str] | None) -> tuple[str, ...]:
    """Return the canonical texts of the methods, with dense training first."""
    if not texts:
        return default_methods()
    methods = [parse_method(text) for text in texts]
    for method in methods:
        check_simulated(method)
    return tuple(dict.fromkeys([DENSE, *map(str, methods)]))


def open_table(arguments: argparse.Namespace, name: str = "convergence") -> ResultTable:
    """Open a table of runs, with the finished ones if the experiment is resumed."""
    path, columns = arguments.out / f"{name}.csv", (*RUN_COLUMNS, *OUTCOME_COLUMNS)
    return ResultTable(path, columns, arguments.size.task, resume=arguments.resume)


def open_curves(arguments: argparse.Namespace) -> ResultTable:
    """Open the curves, with those of the finished runs if the experiment is resumed."""
    size, path = arguments.size, arguments.out / "convergence_curves.csv"
    columns = (*RUN_COLUMNS, "quantity", *map(str, range(1, size.epochs + 1)))
    return ResultTable(path, columns, size.task, resume=arguments.resume, curves=True)


def tuning_runs(arguments: argparse.Namespace) -> Iterator[SimulatedRun]:
    """Yield the runs that choose the learning rates."""
    for seed in tuning_seeds(arguments.seeds, 2):
        for optimizer, workers, method in _combinations(arguments):
            for lr in arguments.size.lrs[optimizer]:
                yield SimulatedRun(optimizer, workers, method, lr, seed)


def reported_runs(
    arguments: argparse.Namespace, chosen: dict[tuple[str, str], float]
) -> Iterator[SimulatedRun]:
    """Yield each method with its own learning rate, and with that of dense training."""
    for seed in arguments.seeds:
        for optimizer, workers, method in _combinations(arguments):
            for lr in dict.fromkeys([chosen[optimizer, method], chosen[optimizer, DENSE]]):
                yield SimulatedRun(optimizer, workers, method, lr, seed)


def _combinations(arguments: argparse.Namespace) -> Iterator[tuple[str, int, str]]:
    return itertools.product(arguments.optimizers, arguments.workers, arguments.methods)


def train_missing(
    runs: Iterable[SimulatedRun],
    arguments: argparse.Namespace,
    table: ResultTable,
    curves: ResultTable | None = None,
) -> None:
    """Train the runs that the tables do not have, several at a time, and save each one's rows."""
    # The curves of a run are saved before its row, so a finished row always has its curves.
    if curves is not None:
        finished = {SimulatedRun.of(row) for row in table.rows}
        curves.rows = [row for row in curves.rows if SimulatedRun.of(row) in finished]
    finished = {SimulatedRun.of(row) for row in table.rows}
    missing = [run for run in runs if run not in finished]
    for run, trajectory in zip(missing, _trajectories(missing, arguments), strict=True):
        if curves is not None:
            curves.add(*((*run.cells, *cells) for cells in trajectory.curves))
        table.add((*run.cells, *trajectory.cells))
        print(*run.cells, *trajectory.cells, flush=True)


def _trajectories(runs: list[SimulatedRun], arguments: argparse.Namespace) -> Iterator[Trajectory]:
    train = partial(simulate, epochs=arguments.size.epochs)
    processes = min(arguments.processes, len(runs))
    if processes < 2:
        yield from map(train, runs)
        return
    # Fresh processes: PyTorch's threads do not survive a fork.
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, context, torch.set_num_threads, (1,)) as pool:
        yield from pool.map(train, runs)


if __name__ == "__main__":
    main()
