"""RandAugment on a whole batch, reproducible from (seed, epoch, step).

Source: Cubuk, Zoph, Shlens, Le, "RandAugment: practical automated data augmentation with a reduced
search space", NeurIPS 2020. Each image gets several operations in sequence: torchvision's, all of
one strength, or Composer's, which draw theirs below the magnitude.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.image_data import composer
from recipes.image_data.order import RANDAUGMENT, TrainOrder, keyed_seed
from recipes.image_data.sources import vision


@dataclass(frozen=True)
class RandAugment:
    """Random operations on training images; 0 operations per image disable it.

    The magnitude is 0 to 30 with torchvision's operations, and 1 to 10 with Composer's.
    """

    ops: int
    magnitude: int
    order: TrainOrder
    variant: str = "torchvision"

    def __call__(self, images: Tensor, epoch: int, step: int) -> Tensor:
        """Augment this rank's uint8 images (N, H, W, C) of one step."""
        if not self.ops:
            return images
        planes = images.permute(0, 3, 1, 2).contiguous()
        change = self._composer if self.variant == "composer" else self._torchvision
        return change(planes, epoch, step).permute(0, 2, 3, 1)

    def _torchvision(self, images: Tensor, epoch: int, step: int) -> Tensor:
        change = vision().transforms.RandAugment(self.ops, self.magnitude)
        first, changed = self.order.rank_slice.start, []
        # torchvision draws from the global generator: a seed for each image of the whole batch
        # makes the result the same for any number of ranks.
        with torch.random.fork_rng(devices=[]):
            for place, image in enumerate(images, first):
                key = (RANDAUGMENT, self.order.seed, epoch, step, place)
                torch.default_generator.manual_seed(keyed_seed(*key))
                changed.append(change(image))
        return torch.stack(changed)

    def _composer(self, images: Tensor, epoch: int, step: int) -> Tensor:
        # Draw for the images of all ranks, so that the result does not depend on their number.
        seed = keyed_seed(RANDAUGMENT, self.order.seed, epoch, step)
        random = torch.Generator().manual_seed(seed)
        shape, own = (self.order.batch_size, self.ops), self.order.rank_slice
        chosen = torch.randint(len(composer.OPERATIONS), shape, generator=random)[own]
        signs = (torch.randint(2, shape, generator=random) * 2 - 1)[own]
        uniform = torch.rand(shape, generator=random, dtype=torch.float64)[own]
        for turn in range(self.ops):
            # All images with the same operation are changed together.
            for number, operation in enumerate(composer.OPERATIONS):
                rows = (chosen[:, turn] == number).nonzero().squeeze(1)
                if len(rows):
                    own_rows = rows.to(images.device)
                    drawn = (uniform[rows, turn], signs[rows, turn])
                    images[own_rows] = operation(images[own_rows], *drawn, self.magnitude)
        return images
