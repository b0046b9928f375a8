"""Shifts, mirroring and normalisation of a whole batch, reproducible from (seed, epoch, step).

The random numbers are drawn for the batch of all ranks and each rank uses its slice, so an image
is augmented alike whatever the number of ranks, and a resumed epoch goes on where it stopped.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from recipes.image_data.order import AUGMENT, TrainOrder, keyed_seed
from recipes.image_data.presets import Preset


@dataclass(frozen=True)
class Augmentation:
    """Random shifts and mirroring of training images (N, H, W, C)."""

    preset: Preset
    order: TrainOrder

    def __call__(self, images: Tensor, epoch: int, step: int) -> Tensor:
        """Augment this rank's images of one step."""
        seed = keyed_seed(AUGMENT, self.order.seed, epoch, step)
        random = torch.Generator().manual_seed(seed)
        batch, mine = self.order.batch_size, self.order.mine
        shifts = torch.randint(0, 2 * self.preset.shift + 1, (batch, 2), generator=random)
        mirrored = torch.rand(batch, generator=random) < 0.5
        if self.preset.shift:
            images = _shifted(images, shifts[mine].to(images.device), self.preset.shift)
        if self.preset.mirror:
            flags = mirrored[mine].to(images.device)
            images = torch.where(flags[:, None, None, None], images.flip(2), images)
        return images


def _shifted(images: Tensor, shifts: Tensor, most: int) -> Tensor:
    count, height, width, _ = images.shape
    padded = pad(images, (0, 0, most, most, most, most))
    rows = shifts[:, :1] + torch.arange(height, device=images.device)
    columns = shifts[:, 1:] + torch.arange(width, device=images.device)
    each = torch.arange(count, device=images.device)[:, None, None]
    return padded[each, rows[:, :, None], columns[:, None, :]]


def normalised(images: Tensor, preset: Preset) -> Tensor:
    """Turn bytes (N, H, W, C) into floats (N, C, H, W) of mean 0 and deviation 1."""
    mean = torch.tensor(preset.mean, device=images.device)
    std = torch.tensor(preset.std, device=images.device)
    return ((images.float() - mean) / std).permute(0, 3, 1, 2)
