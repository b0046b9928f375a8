"""One run of the convergence experiment: what is trained, how, and its rows in the tables."""

import math
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from recipes.image_data.order import TrainOrder
from recipes.jointspar.convergence_summary import QUANTITIES
from recipes.jointspar.image_sets import SIZES, Batches, ImageSet, accuracy, open_images
from recipes.jointspar.layer_training import build_optimizer, paper_schedule
from recipes.jointspar.methods import LayerSampling, parse_method
from recipes.jointspar.networks import ResidualMLP
from recipes.jointspar.simulation import SimulatedRanks

BATCH = 25
"""Images of one worker per step."""
_HIDDEN = (16, 64, 32, 128)

RUN_COLUMNS = ("optimizer", "workers", "method", "lr", "seed")
OUTCOME_COLUMNS = (
    *("train_loss", "validation", "test", "computed", "sent"),
    *("lowest_p", "highest_p", "largest_norm"),
)


@dataclass(frozen=True)
class SimulatedRun:
    """The settings of a run.

    Attributes:
        optimizer: "sgd" or "lars". Per-rank sets train with "lars-own" in place of "lars", because
            their ranks know no common p.
        workers: number of simulated ranks.
        method: the text of the method.
        lr: the peak learning rate of one worker. It is multiplied by the number of workers.
        seed: seed of weights, data order and draws.
    """

    optimizer: str
    workers: int
    method: str
    lr: float
    seed: int

    @classmethod
    def of(cls, row: dict[str, str]) -> "SimulatedRun":
        """Read the first cells of a row."""
        lr, seed = float(row["lr"]), int(row["seed"])
        return cls(row["optimizer"], int(row["workers"]), row["method"], lr, seed)

    @property
    def cells(self) -> tuple[object, ...]:
        """The first cells of a row."""
        return self.optimizer, self.workers, self.method, self.lr, self.seed


@dataclass(frozen=True)
class Trajectory:
    """The measurements of a run. Accuracies are in per cent; all are NaN if the run diverged.

    Attributes:
        losses: mean cross-entropy on all training images, in nats, after every epoch.
        tests: accuracy on the test images after every epoch.
        validation: final accuracy on the held-out images.
        computed: share of the layers whose gradients a rank computed.
        sent: share of the bytes that an all-reduce would have carried.
        lowest, highest: the extreme probabilities of a layer after the run.
        largest: the largest norm of a layer's gradient that the bandits saw: L of the paper's rule.
    """

    losses: tuple[float, ...]
    tests: tuple[float, ...]
    validation: float
    computed: float
    sent: float
    lowest: float
    highest: float
    largest: float

    @property
    def cells(self) -> tuple[str, ...]:
        """The last cells of the run's row."""
        return (
            *(f"{self.losses[-1]:.5g}", f"{self.validation:.3f}", f"{self.tests[-1]:.3f}"),
            *(f"{self.computed:.4f}", f"{self.sent:.4f}"),
            *(f"{self.lowest:.4f}", f"{self.highest:.4f}", f"{self.largest:.4g}"),
        )

    @property
    def curves(self) -> tuple[tuple[str, ...], ...]:
        """The last cells of the run's curves."""
        losses = (QUANTITIES[0], *(f"{loss:.4g}" for loss in self.losses))
        return losses, (QUANTITIES[1], *(f"{test:.2f}" for test in self.tests))


def steps_per_epoch(workers: int) -> int:
    """Return the whole batches in an epoch."""
    return len(_digits().train.labels) // (BATCH * workers)


def simulate(run: SimulatedRun, epochs: int) -> Trajectory:
    """Train with simulated ranks, and measure after every epoch."""
    images, method = _digits(), parse_method(run.method)
    count, batch = len(images.train.labels), BATCH * run.workers
    ranks = [
        Batches(images, TrainOrder(count, batch, rank, run.workers, run.seed))
        for rank in range(run.workers)
    ]
    per_epoch = ranks[0].steps_per_epoch
    torch.manual_seed(run.seed)
    module = ResidualMLP(SIZES["digits"].size ** 2, SIZES["digits"].classes, _HIDDEN)
    simulated = SimulatedRanks(module, method, run.workers, run.seed)
    lr = run.lr * run.workers
    hyperparameters = paper_schedule(epochs * per_epoch, lr, optimizer_for(run))
    optimizer = build_optimizer(module, hyperparameters, simulated if simulated.samplers else None)
    losses, tests = [], []
    for step in range(hyperparameters.steps):
        for group in optimizer.param_groups:
            group["lr"] = hyperparameters.lr_at(step)
        batches = [each.batch(step) for each in ranks]
        if not simulated.backward([partial(_loss, module, *each) for each in batches]):
            return _diverged(epochs)
        optimizer.step()
        if (step + 1) % per_epoch == 0:
            losses.append(_loss(module, images.train.images, images.train.labels).item())
            tests.append(accuracy(module, images.test))
    return Trajectory(
        *(tuple(losses), tuple(tests), accuracy(module, images.validation)),
        *(simulated.computed, simulated.sent, *simulated.extremes, simulated.largest),
    )


def _loss(module: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(module(images), labels)


def _diverged(epochs: int) -> Trajectory:
    nans = (math.nan,) * epochs
    return Trajectory(nans, nans, *(math.nan,) * 6)


def optimizer_for(run: SimulatedRun) -> str:
    """Return the optimizer that a run trains with."""
    method = parse_method(run.method)
    per_rank = isinstance(method, LayerSampling) and not method.shared
    return "lars-own" if per_rank and run.optimizer == "lars" else run.optimizer


@cache
def _digits() -> ImageSet:
    return open_images("digits", None)
