"""Accuracy and bytes of JointSpar-LARS, LARS, uniform dropping, and TopK at equal bytes.

    python -m recipes.jointspar.large_batch
    python -m recipes.jointspar.large_batch --quick
    python -m recipes.jointspar.large_batch --resume
    python -m recipes.jointspar.large_batch --dataset cifar10 --data FOLDER --network conv

Takes twenty minutes on two cores. Two ranks train over gloo, every method with every learning rate
and every seed. The accuracy on held-out images selects the learning rate, and the test images
measure the result. Each finished run is saved to ``large_batch.csv``. ``accuracy.png`` shows the
summary. The metrics of one run are in ``metrics.jsonl``, and ``probabilities.png`` shows them.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from recipes.errors import exit_on_user_error
from recipes.experiments import ResultTable
from recipes.image_data.order import TrainOrder
from recipes.jointspar.drawing import draw_accuracy, draw_probabilities
from recipes.jointspar.image_sets import SIZES, Batches, ImageSet, open_images
from recipes.jointspar.layer_training import paper_schedule, train
from recipes.jointspar.methods import Dense, LayerSampling, Method, TopK
from recipes.jointspar.networks import small_network
from recipes.jointspar.parts import part_parser
from recipes.jointspar.run_table import (
    COLUMNS,
    TABLE,
    Contender,
    PlannedRun,
    TrainingRun,
    summaries,
    summary_table,
)
from recipes.local_ranks import run_on_ranks
from recipes.result_files import make_folder

RANKS = 2
# A run of a seed takes minutes, so there are fewer than of the other parts.
SEEDS = (0, 1, 2, 3, 4)
BUDGETS = (0.3, 0.45, 0.6, 0.75, 0.9)
LOGGED = Contender(LayerSampling(0.6, "bytes"))
# The share of dense DDP's bytes that TopK within the kept layers would send if all were kept.
_INNER_SHARE = 0.05


@dataclass(frozen=True)
class ExperimentSize:
    """The number and the length of the runs."""

    epochs: int
    batch: int
    lrs: tuple[float, ...]
    budgets: tuple[float, ...]


WHOLE = ExperimentSize(epochs=60, batch=400, lrs=(0.3, 0.6), budgets=BUDGETS)
QUICK = ExperimentSize(epochs=6, batch=400, lrs=(0.3,), budgets=(0.6,))


def contenders(budgets: tuple[float, ...]) -> list[Contender]:
    """Return all methods that are compared, each with its optimizer."""
    found = [Contender(Dense())]
    for budget in budgets:
        learned, uniform = LayerSampling(budget, "bytes"), LayerSampling(budget, "bytes", rule=None)
        for method in (learned, uniform):
            found += [Contender(method, optimizer) for optimizer in ("lars", "lars-own")]
        found.append(Contender(TopK(budget)))
    few: list[Method] = [TopK(0.05), LayerSampling(0.6, "bytes", topk=_INNER_SHARE)]
    return [*found, *map(Contender, few)]


@exit_on_user_error()
def main() -> None:
    """Train the missing runs, print the summary, and draw the pictures."""
    arguments = parse(sys.argv[1:])
    # Check all input before any process starts.
    table = open_table(arguments)
    open_images(arguments.dataset, arguments.data)
    make_folder(arguments.out)
    table.save()
    planned = missing(arguments, [TrainingRun.of(row) for row in table.rows])
    if planned:
        table.rows = run_on_ranks(RANKS, train_all, arguments, planned, table)[0]
    rows = summaries([TrainingRun.of(row) for row in table.rows])
    print(summary_table(rows))
    draw_accuracy(rows, arguments.out / "accuracy.png")
    log = arguments.out / "metrics.jsonl"
    # A folder that is resumed can have the finished rows without the log.
    if log.is_file():
        draw_probabilities(log, arguments.out / "probabilities.png")
    else:
        print(f"{log} does not exist, so there is no probabilities.png")


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = part_parser(__doc__, SEEDS)
    parser.add_argument("--dataset", choices=sorted(set(SIZES) - {"imagenet"}), default="digits")
    parser.add_argument("--data", type=Path, help="folder of the data set; digits needs none")
    parser.add_argument("--network", choices=("mlp", "conv"), default="mlp")
    parsed = parser.read(words)
    published = parsed.dataset == "digits" and parsed.network == "mlp"
    parsed.out = parser.output_folder(parsed, published=published)
    parsed.size = QUICK if parsed.quick else WHOLE
    return parsed


def open_table(arguments: argparse.Namespace) -> ResultTable:
    """Open the table, with the finished runs if the experiment is resumed."""
    task = task_of(arguments.dataset, arguments.network, arguments.size)
    return ResultTable(arguments.out / TABLE, COLUMNS, task, resume=arguments.resume)


def task_of(dataset: str, network: str, size: ExperimentSize) -> str:
    """Return the settings that all rows share. Runs with other settings cannot be compared."""
    return f"{dataset}, {network}, {size.epochs} epochs of batches of {size.batch}, {RANKS} ranks"


def missing(arguments: argparse.Namespace, runs: list[TrainingRun]) -> list[PlannedRun]:
    """Return the planned runs that are not finished."""
    finished = {run.planned for run in runs}
    planned = everything(arguments.size, arguments.seeds)
    return [run for run in planned if run not in finished]


def everything(size: ExperimentSize, seeds: tuple[int, ...]) -> Iterator[PlannedRun]:
    """Yield all runs. The seed changes last, so an interrupted table has whole rounds."""
    for seed in seeds:
        for contender in contenders(size.budgets):
            for lr in size.lrs:
                yield PlannedRun(contender, lr, seed)


def train_all(
    arguments: argparse.Namespace, runs: list[PlannedRun], table: ResultTable
) -> list[dict[str, str]]:
    """Train every run together with the other rank, and return the rows. Rank 0 saves them."""
    images = open_images(arguments.dataset, arguments.data)
    for planned in runs:
        data = batches_of(images, arguments.size, planned.seed)
        # One log is enough: budget 60 %, the first learning rate, the first seed.
        first = PlannedRun(LOGGED, arguments.size.lrs[0], arguments.seeds[0])
        log = arguments.out / "metrics.jsonl" if planned == first else None
        # The same seed on both ranks gives the same weights.
        torch.manual_seed(planned.seed)
        module = small_network(arguments.network, SIZES[arguments.dataset])
        contender = planned.contender
        steps = arguments.size.epochs * data.steps_per_epoch
        hyperparameters = paper_schedule(steps, planned.lr, contender.optimizer)
        outcome = train(module, data, contender.method, hyperparameters, planned.seed, log)
        if dist.get_rank() == 0:
            run = TrainingRun(planned, outcome)
            table.add(run.cells())
            print(*run.cells(), flush=True)
    return table.rows


def batches_of(images: ImageSet, size: ExperimentSize, seed: int) -> Batches:
    """Return this rank's batches."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return Batches(images, TrainOrder(len(images.train.labels), size.batch, rank, ranks, seed))


if __name__ == "__main__":
    main()
