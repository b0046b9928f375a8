"""Augmentation of a whole batch, reproducible from (seed, epoch, step): shifts, mirroring,
torchvision's RandAugment, and MixUp; and normalisation.

Every rank draws the random numbers of all ranks' images and uses its slice. The augmentation of an
image therefore does not depend on the number of ranks, nor on where a run was resumed. RandAugment:
Cubuk et al., NeurIPS 2020. MixUp: Zhang et al., "mixup: beyond empirical risk minimization", 2018.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from recipes.image_data.order import AUGMENT, MIXUP, RANDAUGMENT, TrainOrder, keyed_seed
from recipes.image_data.presets import Preset
from recipes.image_data.sources import vision


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


@dataclass(frozen=True)
class RandAugment:
    """Random operations of a magnitude, 0 to 30; 0 operations per image disable it."""

    ops: int
    magnitude: int
    order: TrainOrder

    def __call__(self, images: Tensor, epoch: int, step: int) -> Tensor:
        """Augment this rank's uint8 images (N, H, W, C) of one step."""
        if not self.ops:
            return images
        change = vision().transforms.RandAugment(self.ops, self.magnitude)
        first, changed = self.order.rank_slice.start, []
        # torchvision draws from the global generator: a seed for each image of the whole batch
        # makes the result the same for any number of ranks.
        with torch.random.fork_rng(devices=[]):
            for place, image in enumerate(images.permute(0, 3, 1, 2).contiguous(), first):
                key = (RANDAUGMENT, self.order.seed, epoch, step, place)
                torch.default_generator.manual_seed(keyed_seed(*key))
                changed.append(change(image))
        return torch.stack(changed).permute(0, 2, 3, 1)


@dataclass(frozen=True)
class MixUp:
    """Mixes each image of a batch with another image of the same rank.

    The other image's share is min(z, 1 - z), with z drawn from Beta(alpha, alpha); an alpha of 0
    disables MixUp.

    - ``shares="image"``: a share for each image, as in the paper's equation. Images 0 and 1, 2 and
      3, and so on are mixed with each other; the batch is in random order. A rank's batch must have
      an even number of images. The result does not depend on the number of ranks.
    - ``shares="micro-batch"``: a share for each micro-batch, whose images are mixed in a random
      permutation. An image can meet itself. The code of Gu et al., ICLR 2024 (arXiv 2310.14423),
      does this with the MixUp of MosaicML's Composer 0.15.1 (github.com/hmgxr128/QSR,
      ``xmodel.py``). The result depends on the size of a micro-batch, and so on the number of
      ranks: 16 ranks with 2 micro-batches each and 32 ranks with 1 give the same.
    """

    alpha: float
    classes: int
    order: TrainOrder
    shares: str = "image"
    micro_batches: int = 1

    def __call__(
        self, images: Tensor, labels: Tensor, epoch: int, step: int
    ) -> tuple[Tensor, Tensor]:
        """Return mixed images (N, ...) and probabilities (N, classes); labels have shape (N)."""
        if not self.alpha:
            return images, labels
        shares, others = self.draw(epoch, step)
        shares, others = shares.to(images), others.to(images.device)
        targets = one_hot(labels, self.classes).to(images.dtype)
        return _mix(images, shares, others), _mix(targets, shares, others)

    def draw(self, epoch: int, step: int) -> tuple[Tensor, Tensor]:
        """Return, for each image of this rank, the other image's share and its index: (N), (N)."""
        # Every rank draws for the images of all ranks, and uses its slice.
        random = np.random.default_rng((MIXUP, self.order.seed, epoch, step))
        batch, own = self.order.batch_size, self.order.rank_slice
        if self.shares == "image":
            drawn, others = random.beta(self.alpha, self.alpha, batch), np.arange(batch) ^ 1
        else:
            count = self.order.world_size * self.micro_batches
            size = batch // count
            drawn = random.beta(self.alpha, self.alpha, count).repeat(size)
            others = random.permuted(np.arange(batch).reshape(count, size), axis=1).flatten()
        # Beta(alpha, alpha) is symmetric. The smaller part goes to the other image.
        smaller = np.minimum(drawn, 1 - drawn)
        return torch.from_numpy(smaller[own]), torch.from_numpy(others[own] - own.start)


def _mix(values: Tensor, shares: Tensor, others: Tensor) -> Tensor:
    return values.lerp(values[others], shares.view(-1, *[1] * (values.ndim - 1)))
