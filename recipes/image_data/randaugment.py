"""RandAugment on a whole batch, reproducible from (seed, epoch, step).

Source: Cubuk, Zoph, Shlens, Le, "RandAugment: practical automated data augmentation with a reduced
search space", NeurIPS 2020. Each image gets several operations in sequence, drawn from the list of
a variant. All images with the same operation are changed together, on the device, after either
loader.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.image_data import composer_operations, torchvision_operations
from recipes.image_data.order import RANDAUGMENT, TrainOrder, keyed_seed

# Arguments: uint8 images (N, C, H, W), a number from 0 to 1 and a sign for each image (N), and the
# magnitude. An operation that does not need a number or a sign ignores it.
Operation = Callable[[Tensor, Tensor, Tensor, float], Tensor]

OPERATIONS: dict[str, tuple[Operation, ...]] = {
    "torchvision": torchvision_operations.OPERATIONS,
    "composer": composer_operations.OPERATIONS,
}


@dataclass(frozen=True)
class RandAugment:
    """Random operations on training images.

    Attributes:
        ops: number of operations per image; 0 disables RandAugment.
        magnitude: with torchvision's operations, the strength of all, 0 to 30; with Composer's,
            the upper end of the strength that each use draws, 1 to 10.
        order: which images this rank gets.
        variant: whose operations, a key of :data:`OPERATIONS`.
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
        for chosen, signs, uniform in zip(*self._draw(epoch, step), strict=True):
            self._apply(planes, chosen, signs, uniform)
        return planes.permute(0, 2, 3, 1)

    def _draw(self, epoch: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's operations, signs and uniform numbers, each of shape (ops, N)."""
        # Draw for the images of all ranks, so that the result does not depend on their number.
        seed = keyed_seed(RANDAUGMENT, self.order.seed, epoch, step)
        random = torch.Generator().manual_seed(seed)
        shape, own = (self.order.batch_size, self.ops), self.order.rank_slice
        chosen = torch.randint(len(OPERATIONS[self.variant]), shape, generator=random)
        signs = torch.randint(2, shape, generator=random) * 2 - 1
        uniform = torch.rand(shape, generator=random, dtype=torch.float64)
        return chosen[own].T, signs[own].T, uniform[own].T

    def _apply(self, images: Tensor, chosen: Tensor, signs: Tensor, uniform: Tensor) -> None:
        for number, operation in enumerate(OPERATIONS[self.variant]):
            rows = (chosen == number).nonzero().squeeze(1)
            if len(rows):
                own = rows.to(images.device)
                images[own] = operation(images[own], uniform[rows], signs[rows], self.magnitude)
