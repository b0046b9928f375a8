"""The data set, as images in three parts, and its models."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from recipes.image_data.augment import normalise
from recipes.image_data.order import NOISE, keyed_seed
from recipes.image_data.presets import PRESETS, Preset
from recipes.image_data.public_sets import read_public
from recipes.image_data.sources import Arrays
from recipes.models import SmallCNN
from recipes.qsr.side_by_side import EachInTurn, stacked_mlp
from recipes.simple_vit import SimpleViT, Size

_Model = TypeVar("_Model", bound=nn.Module)
_HIDDEN = 128
# Four patches of 4 x 4 pixels.
_VIT = Size(patch=4, width=64, depth=2, heads=4, mlp=128)


@dataclass(frozen=True)
class Part:
    """Images (N, H, W, C) in uint8, and labels (N)."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Task:
    """A data set; methods are tuned on ``validation`` and compared on ``test``."""

    preset: Preset
    train: Part
    validation: Part
    test: Part

    def part(self, name: str) -> Part:
        """Return "validation" or "test"."""
        return {"validation": self.validation, "test": self.test}[name]

    def build(self, model: str, seeds: Sequence[int]) -> nn.Module:
        """Return a model for each seed, side by side, with fresh weights.

        Args:
            model: "mlp", "vit" or "cnn".
            seeds: the same seed gives the same weights.
        """
        shape = (self.preset.channels, self.preset.classes)
        if model == "mlp":
            return stacked_mlp([_fresh(seed, _mlp, self.preset) for seed in seeds])
        if model == "vit":
            return EachInTurn([_fresh(seed, SimpleViT, _VIT, *shape) for seed in seeds])
        return EachInTurn([_fresh(seed, SmallCNN, *shape) for seed in seeds])

    def inputs(self, images: Tensor) -> Tensor:
        """Convert uint8 images to the model's normalised input."""
        return normalise(images, self.preset)


def open_task(dataset: str, data: Path | None, label_noise: float) -> Task:
    """Read a data set; nothing is downloaded.

    Args:
        dataset: "digits" or "cifar10".
        data: CIFAR-10's python archive; None for the digits, which are embedded.
        label_noise: fraction of the training labels that are replaced by random classes.

    Raises:
        RecipeError: if ``data`` is not CIFAR-10's archive, or is set for the digits.
    """
    task = _digits(data) if dataset == "digits" else _cifar10(data)
    train = _noisy(task.train, task.preset.classes, label_noise)
    return replace(task, train=train)


def _digits(data: Path | None) -> Task:
    whole = _joined(read_public("digits", data))
    # A fifth to train on, and the rest to evaluate on: an image of 719 is 0.14 points.
    fifth = np.arange(len(whole)) % 5
    chosen = (fifth == 0, fifth % 2 == 1, (fifth == 2) | (fifth == 4))
    return Task(PRESETS["digits"], *(_part(whole, those) for those in chosen))


def _cifar10(data: Path | None) -> Task:
    arrays = read_public("cifar10", data)
    # Every tenth training image is held out, so that the test images choose nothing.
    tuning = np.arange(len(arrays["train"])) % 10 == 9
    every = np.ones(len(arrays["test"]), dtype=bool)
    parts = [_part(arrays["train"], ~tuning), _part(arrays["train"], tuning)]
    return Task(PRESETS["cifar10"], *parts, _part(arrays["test"], every))


def _joined(splits: dict[str, Arrays]) -> Arrays:
    both = list(splits.values())
    return Arrays(
        np.concatenate([arrays.images for arrays in both]),
        np.concatenate([arrays.labels for arrays in both]),
    )


def _part(arrays: Arrays, chosen: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> Part:
    return Part(torch.from_numpy(arrays.images[chosen]), torch.from_numpy(arrays.labels[chosen]))


def _noisy(part: Part, classes: int, share: float) -> Part:
    """Replace a fraction of the labels by random classes."""
    # The seed is constant, because wrong labels belong to the data: all runs share them.
    random = torch.Generator().manual_seed(keyed_seed(NOISE, 0))
    drawn = torch.rand(len(part.labels), generator=random) < share
    # All classes, so that a tenth of the digits' replaced labels are right again.
    others = torch.randint(classes, part.labels.shape, generator=random)
    return replace(part, labels=torch.where(drawn, others, part.labels))


def _fresh(seed: int, build: Callable[..., _Model], *shape: Any) -> _Model:
    """Return a model whose weights depend on the seed alone."""
    # The caller's random state stays as it is.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(*shape)


def _mlp(preset: Preset) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(preset.channels * preset.size**2, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, preset.classes),
    )
