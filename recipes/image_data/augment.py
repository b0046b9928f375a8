"""Shifts, mirroring and normalisation of a whole batch, reproducible from (seed, epoch, step).

Every rank draws the random numbers of all ranks' images and uses its slice. The augmentation of an
image therefore does not depend on the number of ranks, nor on where a run was resumed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from recipes.image_data.order import AUGMENT, TrainOrder, keyed_seed
from recipes.image_data.presets import Preset


@dataclass(frozen=True)
class Augmentation:
    """Random shifts and mirroring of training images (N, H, W, C), uint8."""

    preset: Preset
    order: TrainOrder

    def __call__(self, images: Tensor, epoch: int, step: int) -> Tensor:
        """Augment this rank's images of one step."""
        seed = keyed_seed(AUGMENT, self.order.seed, epoch, step)
        # On the CPU, whose random numbers do not depend on the GPU's model.
        random = torch.Generator().manual_seed(seed)
        batch, own = self.order.batch_size, self.order.rank_slice
        # Always draw both, so that the mirroring does not depend on whether there are shifts.
        shifts = torch.randint(0, 2 * self.preset.shift + 1, (batch, 2), generator=random)
        mirrored = torch.rand(batch, generator=random) < 0.5
        if self.preset.shift:
            images = _shift(images, shifts[own].to(images.device), self.preset.shift)
        if self.preset.mirror:
            flags = mirrored[own].to(images.device)
            images = torch.where(flags[:, None, None, None], images.flip(2), images)
        return images


def _shift(images: Tensor, shifts: Tensor, max_shift: int) -> Tensor:
    count, height, width, _ = images.shape
    padded = pad(images, (0, 0, max_shift, max_shift, max_shift, max_shift))
    # One gather for the whole batch, in place of a crop per image.
    rows = shifts[:, :1] + torch.arange(height, device=images.device)
    columns = shifts[:, 1:] + torch.arange(width, device=images.device)
    index = torch.arange(count, device=images.device)[:, None, None]
    return padded[index, rows[:, :, None], columns[:, None, :]]


def normalise(images: Tensor, preset: Preset) -> Tensor:
    """Convert uint8 (N, H, W, C) to float32 (N, C, H, W) with mean 0 and standard deviation 1."""
    mean = torch.tensor(preset.mean, device=images.device)
    std = torch.tensor(preset.std, device=images.device)
    return ((images.float() - mean) / std).permute(0, 3, 1, 2)
