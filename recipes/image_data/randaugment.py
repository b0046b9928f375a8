"""torchvision's RandAugment on a whole batch, reproducible from (seed, epoch, step).

Source: Cubuk, Zoph, Shlens, Le, "RandAugment: practical automated data augmentation with a reduced
search space", NeurIPS 2020. Each image gets several operations in sequence, all of one strength.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.image_data.order import RANDAUGMENT, TrainOrder, keyed_seed
from recipes.image_data.sources import vision


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
