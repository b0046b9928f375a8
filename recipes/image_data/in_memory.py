"""Small data sets as tensors in memory: standardised, with some training images held out."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from recipes.errors import RecipeError
from recipes.image_data.sources import Arrays


@dataclass(frozen=True)
class Split:
    """Images (N, C, H, W), standardised, and labels (N)."""

    images: Tensor
    labels: Tensor

    def take(self, chosen: Tensor) -> "Split":
        """Return the images that ``chosen`` (indices or a mask) names."""
        return Split(self.images[chosen], self.labels[chosen])


def standardised(arrays: Mapping[str, Arrays], hold_out: int = 6) -> tuple[Split, Split, Split]:
    """Return what to train on, what was held out of it, and the test images.

    Args:
        arrays: the data set's "train" and "test".
        hold_out: one of so many training images is held out; 0 holds out none.
    """
    pixels = arrays["train"].images.astype("float32")
    mean, std = float(pixels.mean()), float(pixels.std())
    train, test = (_split(arrays[name], mean, std) for name in ("train", "test"))
    held_out = torch.zeros(len(train.labels), dtype=torch.bool)
    if hold_out:
        held_out = torch.arange(len(train.labels)) % hold_out == hold_out - 1
    return train.take(~held_out), train.take(held_out), test


def existing(path: Path | None, advice: str) -> Path:
    """Return the path that ``--data`` gave.

    Raises:
        RecipeError: with ``advice``, if it was not given, or does not exist.
    """
    if path is None or not path.exists():
        given = "not given" if path is None else f"{path}, which does not exist"
        raise RecipeError(f"--data is {given}: {advice}")
    return path


def _split(arrays: Arrays, mean: float, std: float) -> Split:
    images = torch.from_numpy(arrays.images).permute(0, 3, 1, 2).float()
    return Split(((images - mean) / std).contiguous(), torch.from_numpy(arrays.labels))
