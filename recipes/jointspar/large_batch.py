"""Accuracy and bytes of JointSpar-LARS, LARS, uniform dropping, and TopK at equal bytes.

Two ranks train over gloo, every method with every learning rate and every seed. The accuracy on
held-out images selects the learning rate, and the test images measure the result. The metrics of
one run are in ``metrics.jsonl``.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import nn

from recipes.experiments import ResultTable, fill_on_ranks
from recipes.image_data.in_memory import standardise
from recipes.image_data.sources import read_public
from recipes.jointspar.methods import Dense, LayerSampling, TopK, parse_method
from recipes.jointspar.training import Images, Outcome, ResidualMLP, Schedule, train
from recipes.models import build_model
from recipes.rows import columns

RANKS = 2
# A run takes seconds, so there are fewer seeds than of the other parts.
SEEDS = 5
BUDGETS = (0.3, 0.45, 0.6, 0.75, 0.9)
LRS = (0.3, 0.6)
LOGGED = str(LayerSampling(0.6, "bytes"))


@dataclass(frozen=True)
class Run:
    """A method, an optimizer, a learning rate and a seed to train with."""

    method: str
    optimizer: str
    lr: float
    seed: int


@dataclass(frozen=True)
class Task:
    """What all runs share."""

    dataset: str
    data: Path | None
    network: str
    epochs: int
    batch: int = 400

    def __str__(self) -> str:
        length = f"{self.epochs} epochs of batches of {self.batch}, {RANKS} ranks"
        return f"{self.dataset}, {self.network}, {length}"

    @property
    def images(self) -> Images:
        """The data set; every sixth training image is held out."""
        return _opened(self.dataset, self.data)

    def build(self, images: Images, seed: int) -> nn.Module:
        """Return the network. The same seed on both ranks gives the same weights."""
        torch.manual_seed(seed)
        channels, size = images[0].images.shape[1:3]
        classes = int(images[0].labels.max()) + 1
        if self.network == "mlp":
            return ResidualMLP(channels * size**2, classes)
        small = self.network.startswith("torchvision/resnet")
        return build_model(self.network, channels=channels, classes=classes, small_stem=small)


@cache
def _opened(dataset: str, data: Path | None) -> Images:
    return standardise(read_public(dataset, data))


def task_of(arguments: argparse.Namespace) -> Task:
    """Return the task that the flags describe."""
    epochs = 6 if arguments.quick else 60
    return Task(arguments.dataset, arguments.data, arguments.network, epochs)


def open_large_batch(arguments: argparse.Namespace) -> Callable[[], None]:
    """Return what trains the missing runs."""
    task, lrs = task_of(arguments), LRS[:1] if arguments.quick else LRS
    images = task.images
    task.build(images, 0)
    path = arguments.out / "large_batch.csv"
    table = ResultTable(path, columns(Run), columns(Outcome), str(task), resume=arguments.resume)
    runs = [
        Run(*contender, lr, seed)
        for seed in arguments.seeds[:SEEDS]
        for contender in contenders((0.6,) if arguments.quick else BUDGETS)
        for lr in lrs
    ]
    # One log is enough: budget 60 %, the first learning rate, the first seed.
    logged = Run(LOGGED, "lars", lrs[0], arguments.seeds[0])
    one = partial(train_one, task=task, logged=logged, log=arguments.out / "metrics.jsonl")
    return lambda: fill_on_ranks(RANKS, table, runs, one)


def contenders(budgets: tuple[float, ...]) -> list[tuple[str, str]]:
    """Return all methods that are compared, each with its optimizer."""
    found = [(str(Dense()), "lars")]
    for budget in budgets:
        for method in (LayerSampling(budget, "bytes"), LayerSampling(budget, "bytes", rule=None)):
            found += [(str(method), optimizer) for optimizer in ("lars", "lars-own")]
        found.append((str(TopK(budget)), "lars"))
    few = [TopK(0.05), LayerSampling(0.6, "bytes", topk=0.05)]
    return [*found, *((str(method), "lars") for method in few)]


def train_one(run: Run, task: Task, logged: Run, log: Path, steps: int | None = None) -> Outcome:
    """Train one run together with the other ranks."""
    images, method = task.images, parse_method(run.method)
    steps = steps or task.epochs * (len(images[0].labels) // task.batch)
    schedule = Schedule.of_paper(steps, run.lr)
    module = task.build(images, run.seed)
    file = log if run == logged else None
    return train(module, images, task.batch, method, run.optimizer, schedule, run.seed, file)


if __name__ == "__main__":
    from recipes.jointspar.experiment import main

    main(["--only", "large_batch", *sys.argv[1:]])
