"""Accuracy and bytes of JointSpar-LARS beside LARS, uniform dropping, and TopK at equal bytes.

    python -m recipes.jointspar.large_batch               # twenty minutes on two cores
    python -m recipes.jointspar.large_batch --quick       # a minute, to see that it works
    python -m recipes.jointspar.large_batch --resume      # go on after an interruption
    python -m recipes.jointspar.large_batch --dataset cifar10 --data FOLDER --network conv

Two ranks over gloo. Every method trains with every rate and every seed; the rate is chosen by the
accuracy on held-out images, and the table is of the test images. A run is in ``large_batch.csv`` as
soon as it is over; then come ``accuracy.png`` and, of one run, ``metrics.jsonl`` and its heat map
``probabilities.png``.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from recipes.errors import told_in_one_line
from recipes.image_data.order import TrainOrder
from recipes.jointspar.drawing import draw_accuracy, draw_probabilities
from recipes.jointspar.image_sets import FACTS, Batches, Images, open_images
from recipes.jointspar.layer_training import Course, Method, Outcome, train
from recipes.jointspar.networks import small_network
from recipes.jointspar.run_table import (
    Run,
    append_csv,
    read_runs,
    start_csv,
    summaries,
    summary_table,
)
from recipes.local_ranks import run_on_ranks
from recipes.result_files import make_folder

RANKS = 2
BUDGETS = (0.3, 0.45, 0.6, 0.75, 0.9)
LOGGED = Method("jointspar", 0.6)
TABLE = "large_batch.csv"
_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Size:
    """How much is run."""

    seeds: int = 5
    epochs: int = 60
    batch: int = 400
    rates: tuple[float, ...] = (0.3, 0.6)
    budgets: tuple[float, ...] = BUDGETS


WHOLE = Size()
QUICK = Size(seeds=2, epochs=6, rates=(0.3,), budgets=(0.6,))


@dataclass(frozen=True)
class Plan:
    """One run that is asked for."""

    method: Method
    rate: float
    seed: int


def methods(budgets: tuple[float, ...]) -> list[Method]:
    """Everything that is compared."""
    found = [Method("dense")]
    for budget in budgets:
        for kind in ("jointspar", "uniform"):
            found += [Method(kind, budget, norm) for norm in ("running", "own")]
        found.append(Method("topk", budget))
    return [*found, Method("topk", 0.05), Method("jointspar+topk", 0.6)]


@told_in_one_line()
def main() -> None:
    arguments = parse(sys.argv[1:])
    size = QUICK if arguments.quick else WHOLE
    task = task_of(arguments.dataset, arguments.network, size)
    path = arguments.out / TABLE
    # Here first, so that a path that cannot be used is told before any process starts.
    open_images(arguments.dataset, arguments.data)
    make_folder(arguments.out)
    if not (arguments.resume and path.exists()):
        start_csv(path, task)
    run_on_ranks(RANKS, train_all, arguments, size, missing(size, read_runs(path, task)))
    rows = summaries(read_runs(path, task))
    print(summary_table(rows))
    draw_accuracy(rows, arguments.out / "accuracy.png")
    draw_probabilities(arguments.out / "metrics.jsonl", arguments.out / "probabilities.png")


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="one budget, two seeds, six epochs")
    parser.add_argument("--resume", action="store_true", help="leave out what is in the table")
    parser.add_argument("--dataset", choices=sorted(set(FACTS) - {"imagenet"}), default="digits")
    parser.add_argument("--data", type=Path, help="folder of the data set; digits needs none")
    parser.add_argument("--network", choices=("mlp", "conv"), default="mlp")
    parser.add_argument("--out", type=Path, help="folder of the files [results; quick: runs]")
    parsed = parser.parse_args(words)
    if parsed.out is None:
        # The repository's results are of the digits; nothing else may overwrite them by default.
        whole = parsed.dataset == "digits" and parsed.network == "mlp" and not parsed.quick
        parsed.out = _HERE / "results" if whole else Path("runs/jointspar")
    return parsed


def task_of(dataset: str, network: str, size: Size) -> str:
    """Return what trains on what for how long: only runs of one task can be compared."""
    return f"{dataset}, {network}, {size.epochs} epochs of batches of {size.batch}, {RANKS} ranks"


def missing(size: Size, runs: list[Run]) -> list[Plan]:
    """Return what a table of these runs lacks."""
    done = {Plan(run.method, run.rate, run.seed) for run in runs}
    return [plan for plan in everything(size) if plan not in done]


def everything(size: Size) -> Iterator[Plan]:
    """All runs; the seeds come last, so that a run that is ended early has whole rounds."""
    for seed in range(size.seeds):
        for method in methods(size.budgets):
            for rate in size.rates:
                yield Plan(method, rate, seed)


def train_all(arguments: argparse.Namespace, size: Size, plans: list[Plan]) -> None:
    """Train every plan together with the other rank; the first writes the table."""
    images = open_images(arguments.dataset, arguments.data)
    for plan in plans:
        data = batches_of(images, size, plan.seed)
        # One log is enough: of the 60 % budget, at the first rate and seed.
        logged = plan == Plan(LOGGED, size.rates[0], 0)
        log = arguments.out / "metrics.jsonl" if logged else None
        torch.manual_seed(plan.seed)
        module = small_network(arguments.network, FACTS[arguments.dataset])
        course = course_of(size, data.steps_per_epoch, plan.rate)
        outcome = train(module, data, plan.method, course, plan.seed, log)
        if dist.get_rank() == 0:
            append_csv(arguments.out / TABLE, Run(**vars(plan), outcome=outcome))
            print(_told(plan, outcome), flush=True)


def _told(plan: Plan, outcome: Outcome) -> str:
    named = f"{plan.method.family} {plan.method.budget:.0%}, lr {plan.rate:g}, seed {plan.seed}"
    share = f"{outcome.bytes_share:.0%} of the bytes, {outcome.seconds:.1f} s"
    return f"{named}: {outcome.test:.2f} %, {share}"


def batches_of(images: Images, size: Size, seed: int) -> Batches:
    """This rank's batches."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return Batches(images, TrainOrder(len(images.train.labels), size.batch, rank, ranks, seed))


def course_of(size: Size, steps_per_epoch: int, rate: float, steps: int | None = None) -> Course:
    """The paper's shape of a run, shortened: warm-up for 1/18, drops at 3/9, 5/9 and 7/9."""
    steps = steps or size.epochs * steps_per_epoch
    drops = tuple(steps * part // 9 for part in (3, 5, 7))
    return Course(steps, max(1, steps // 18), drops, rate)


if __name__ == "__main__":
    main()
