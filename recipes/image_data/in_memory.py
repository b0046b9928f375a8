"""Small data sets as tensors in memory, standardised, with a part held out for tuning."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from recipes.image_data.sources import Arrays

_HOLD_OUT = 6


@dataclass(frozen=True)
class Split:
    """Images and their labels (N): standardised (N, C, H, W), or as stored (N, H, W, C), uint8."""

    images: Tensor
    labels: Tensor

    def take(self, chosen: Tensor) -> "Split":
        """Return the images that ``chosen`` selects, a tensor of indices or a mask."""
        return Split(self.images[chosen], self.labels[chosen])


def standardise(arrays: Mapping[str, Arrays]) -> tuple[Split, Split, Split]:
    """Return the training images, every sixth of them that is held out, and the test images."""
    # Statistics of all training images, also the held-out ones, and never of the test images.
    pixels = arrays["train"].images.astype("float32")
    mean, std = float(pixels.mean()), float(pixels.std())
    train, test = (_split(arrays[name], mean, std) for name in ("train", "test"))
    held_out = torch.arange(len(train.labels)) % _HOLD_OUT == _HOLD_OUT - 1
    return train.take(~held_out), train.take(held_out), test


@torch.no_grad()
def evaluate(model: nn.Module, split: Split) -> tuple[float, float]:
    """Return the accuracy, in per cent, and the mean loss; NaN if there are no images."""
    if not len(split.labels):
        return float("nan"), float("nan")
    model.eval()
    scores = torch.cat([model(images) for images in split.images.split(1000)])
    model.train()
    correct = (scores.argmax(1) == split.labels).float().mean()
    return 100 * float(correct), float(cross_entropy(scores, split.labels))


def _split(arrays: Arrays, mean: float, std: float) -> Split:
    # NHWC in the file formats, NCHW in torch.
    images = torch.from_numpy(arrays.images).permute(0, 3, 1, 2).float()
    return Split(((images - mean) / std).contiguous(), torch.from_numpy(arrays.labels))
