"""The workers' training problems: images as tensors, and an MLP or a small CNN.

Each worker takes its own ten images of every batch.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from recipes.image_data.in_memory import Split, standardise
from recipes.image_data.order import TrainOrder
from recipes.image_data.sources import read_public

DATASETS = ("digits", "mnist", "fashion-mnist", "cifar10")
BATCH = 10
_CLASSES = 10


@dataclass(frozen=True)
class Problem:
    """A data set and a model. Every sixth training image is held out to choose learning rates."""

    dataset: str
    model: str
    train: Split
    validation: Split
    test: Split

    def build(self, seed: int) -> nn.Module:
        """Return the model with fresh weights, the same for the same seed."""
        channels, size = self.train.images.shape[1], self.train.images.shape[2]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return _BUILDERS[self.model](channels, size)


def open_problem(dataset: str, model: str, data: Path | None) -> Problem:
    """Read a data set and standardise it. Nothing is ever downloaded."""
    return Problem(dataset, model, *standardise(read_public(dataset, data)))


def _mlp(channels: int, size: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(channels * size * size, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, _CLASSES),
    )


def _cnn(channels: int, size: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        # 4 x 4 positions for images of any size, so that the linear layers always fit.
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, 128),
        nn.ReLU(),
        nn.Linear(128, _CLASSES),
    )


_BUILDERS: dict[str, Callable[[int, int], nn.Module]] = {"mlp": _mlp, "cnn": _cnn}


def batches(problem: Problem, count: int, seed: int) -> Iterator[Tensor]:
    """Yield the indices of the images of every step, one row for each worker, without an end."""
    # One order for all workers, of which each step takes one share per worker.
    order = TrainOrder(len(problem.train.labels), BATCH * count, 0, 1, seed)
    for epoch in itertools.count():
        for chosen in torch.from_numpy(order.batches(epoch)):
            yield chosen.view(count, BATCH)
