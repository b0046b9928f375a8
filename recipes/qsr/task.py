"""The data, drawn anew for every seed, and the models."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from recipes.image_data.augment import normalise
from recipes.image_data.order import NOISE, SPLIT, keyed_seed
from recipes.image_data.presets import PRESETS, Preset
from recipes.image_data.public_sets import read_public
from recipes.models import SmallCNN
from recipes.qsr.side_by_side import EachInTurn, stacked_mlp
from recipes.simple_vit import SimpleViT, Size

_Model = TypeVar("_Model", bound=nn.Module)
# Of 898 or 899 images. The others are evaluated on: an image is 0.19 points.
_DIGITS = 360
_HIDDEN = 128
# Four patches of 4 x 4 pixels.
_VIT = Size(patch=4, width=64, depth=1, heads=4, mlp=128)


@dataclass(frozen=True)
class Part:
    """Images (N, H, W, C) in uint8, and labels (N)."""

    images: Tensor
    labels: Tensor

    def rows(self, chosen: Tensor) -> "Part":
        """Return some of the images."""
        return Part(self.images[chosen], self.labels[chosen])


@dataclass(frozen=True)
class Task:
    """A data set, for tuning and for reporting.

    Attributes:
        preset: of the data set.
        label_noise: fraction of the training labels that are replaced by random classes.
        samples: number of training images.
        sources: for "validation" and "test": the images to train on and those to evaluate on; or
            None in place of the latter, and both are drawn from the former.
    """

    preset: Preset
    label_noise: float
    samples: int
    sources: dict[str, tuple[Part, Part | None]]

    def draw(self, seed: int, part: str) -> tuple[Part, Part]:
        """Return a seed's training images, with its wrong labels, and images to evaluate on.

        Args:
            seed: of the split and the wrong labels, so that differences over the seeds include
                those of the data.
            part: "validation" or "test".
        """
        train, evaluated = self.sources[part]
        if evaluated is None:
            random = torch.Generator().manual_seed(keyed_seed(SPLIT, seed))
            order = torch.randperm(len(train.labels), generator=random)
            evaluated = train.rows(order[self.samples :])
            train = train.rows(order[: self.samples])
        return _noisy(train, self.preset.classes, self.label_noise, seed), evaluated

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
    if dataset == "digits":
        return Task(PRESETS["digits"], label_noise, _DIGITS, _digits(data))
    sources = _cifar10(data)
    samples = len(sources["test"][0].labels)
    return Task(PRESETS["cifar10"], label_noise, samples, sources)


def _digits(data: Path | None) -> dict[str, tuple[Part, Part | None]]:
    splits = read_public("digits", data).values()
    images = torch.cat([torch.from_numpy(split.images) for split in splits])
    whole = Part(images, torch.cat([torch.from_numpy(split.labels) for split in splits]))
    # Tuning and reporting share no image. Each half is split again by every seed.
    even = torch.arange(len(whole.labels)) % 2 == 0
    return {"validation": (whole.rows(even), None), "test": (whole.rows(~even), None)}


def _cifar10(data: Path | None) -> dict[str, tuple[Part, Part | None]]:
    arrays = read_public("cifar10", data)
    train, test = (
        Part(torch.from_numpy(arrays[name].images), torch.from_numpy(arrays[name].labels))
        for name in ("train", "test")
    )
    # Every tenth training image is held out, so that the test images choose nothing.
    held = torch.arange(len(train.labels)) % 10 == 9
    kept = train.rows(~held)
    return {"validation": (kept, train.rows(held)), "test": (kept, test)}


def _noisy(part: Part, classes: int, share: float, seed: int) -> Part:
    """Replace a fraction of the labels by random classes."""
    random = torch.Generator().manual_seed(keyed_seed(NOISE, seed))
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
