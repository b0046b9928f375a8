"""Accuracy and bytes of JointSpar-LARS, LARS, uniform dropping, and TopK at equal bytes.

Two ranks train over gloo, every method with every learning rate and every seed. The accuracy on
held-out images selects the learning rate, and the test images measure the result.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch

from recipes.experiments import ResultTable, fill_on_ranks
from recipes.image_data.in_memory import standardise
from recipes.image_data.sources import read_public
from recipes.jointspar.methods import Dense, LayerSampling, TopK, parse_method
from recipes.jointspar.training import Images, Outcome, ResidualMLP, Schedule, train
from recipes.rows import columns

RANKS, BATCH = 2, 400
# A run takes seconds, so there are fewer seeds than of the other part.
SEEDS = 5
BUDGETS = (0.3, 0.45, 0.6, 0.75, 0.9)
LRS = (0.3, 0.6)


@dataclass(frozen=True)
class Setting:
    method: str
    optimizer: str
    lr: float


@dataclass(frozen=True)
class Run(Setting):
    seed: int


def open_large_batch(arguments: argparse.Namespace) -> Callable[[], None]:
    epochs, task = epochs_and_task(arguments)
    path = arguments.out / "large_batch.csv"
    table = ResultTable(path, columns(Run), columns(Outcome), task, resume=arguments.resume)
    runs = [
        Run(*contender, lr, seed)
        for seed in arguments.seeds[:SEEDS]
        for contender in contenders((0.6,) if arguments.quick else BUDGETS)
        for lr in (LRS[:1] if arguments.quick else LRS)
    ]
    return lambda: fill_on_ranks(RANKS, table, runs, partial(train_one, epochs=epochs))


def epochs_and_task(arguments: argparse.Namespace) -> tuple[int, str]:
    epochs = 6 if arguments.quick else 60
    return epochs, f"digits, mlp, {epochs} epochs of batches of {BATCH}, {RANKS} ranks"


def contenders(budgets: tuple[float, ...]) -> list[tuple[str, str]]:
    """Return all methods that are compared, each with its optimizer."""
    found = [(str(Dense()), "lars")]
    for budget in budgets:
        for method in (LayerSampling(budget, "bytes"), LayerSampling(budget, "bytes", rule=None)):
            found += [(str(method), optimizer) for optimizer in ("lars", "lars-own")]
        found.append((str(TopK(budget)), "lars"))
    few = [TopK(0.05), LayerSampling(0.6, "bytes", topk=0.05)]
    return [*found, *((str(method), "lars") for method in few)]


def train_one(run: Run, epochs: int) -> Outcome:
    images = digits()
    schedule = Schedule.of_paper(epochs * (len(images[0].labels) // BATCH), run.lr)
    # The same seed on both ranks gives the same weights.
    torch.manual_seed(run.seed)
    module = ResidualMLP(64, 10)
    method = parse_method(run.method)
    return train(module, images, BATCH, method, run.optimizer, schedule, run.seed)


@cache
def digits() -> Images:
    """Return the digits; every sixth training image is held out."""
    return standardise(read_public("digits", None))
