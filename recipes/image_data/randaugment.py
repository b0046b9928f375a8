"""RandAugment on a whole batch, reproducible from (seed, epoch, step).

Source: Cubuk, Zoph, Shlens, Le, "RandAugment: practical automated data augmentation with a reduced
search space", NeurIPS 2020. Each image gets several operations in sequence, drawn from the list
below, all with the same strength. Operations and strengths are those of torchvision's RandAugment,
which changes one image at a time. Here all images with the same operation are changed together, on
the device, after either loader.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recipes.image_data.order import RANDAUGMENT, TrainOrder, keyed_seed
from recipes.torchvision_compat import import_torchvision

_MAX_MAGNITUDE = 30
# torchvision's values at the maximum magnitude.
_SHEAR, _SHIFT, _DEGREES, _BLEND, _BITS = 0.3, 150 / 331, 30.0, 0.9, 4


@dataclass(frozen=True)
class RandAugment:
    """Random operations on training images.

    Attributes:
        ops: number of operations per image; 0 disables RandAugment.
        magnitude: their strength, 0 to 30.
        order: which images this rank gets.
    """

    ops: int
    magnitude: int
    order: TrainOrder

    def __call__(self, images: Tensor, epoch: int, step: int) -> Tensor:
        """Augment this rank's uint8 images (N, H, W, C) of one step."""
        if not self.ops:
            return images
        chosen, signs = self._draw(epoch, step)
        planes = images.permute(0, 3, 1, 2).contiguous()
        for operations, directions in zip(chosen.T, signs.T, strict=True):
            _apply(planes, operations, directions, self.magnitude / _MAX_MAGNITUDE)
        return planes.permute(0, 2, 3, 1)

    def _draw(self, epoch: int, step: int) -> tuple[Tensor, Tensor]:
        """Return this rank's operations and signs, each of shape (N, ops)."""
        # Draw for the images of all ranks, so that the result does not depend on their number.
        seed = keyed_seed(RANDAUGMENT, self.order.seed, epoch, step)
        random = torch.Generator().manual_seed(seed)
        shape = (self.order.batch_size, self.ops)
        chosen = torch.randint(len(OPERATIONS), shape, generator=random)
        signs = torch.randint(2, shape, generator=random) * 2 - 1
        return chosen[self.order.rank_slice], signs[self.order.rank_slice]


def _apply(images: Tensor, chosen: Tensor, signs: Tensor, strength: float) -> None:
    functions = functional()
    for number, operation in enumerate(OPERATIONS):
        # One call per operation and sign: torchvision's functions take one strength per call.
        for sign in (-1, 1):
            rows = ((chosen == number) & (signs == sign)).nonzero().squeeze(1).to(images.device)
            if len(rows):
                images[rows] = operation(functions, images[rows], strength, sign)


def functional() -> Any:
    """Return torchvision's functional transforms."""
    import_torchvision()
    return importlib.import_module("torchvision.transforms.functional")


def _shear(functions: Any, images: Tensor, x: float, y: float) -> Tensor:
    # torchvision's RandAugment converts to degrees because affine() takes the tangent again.
    angles = [math.degrees(math.atan(x)), math.degrees(math.atan(y))]
    sheared: Tensor = functions.affine(images, 0.0, [0, 0], 1.0, angles, center=[0, 0])
    return sheared


def _translate(functions: Any, images: Tensor, x: float, y: float) -> Tensor:
    height, width = images.shape[-2:]
    pixels = [int(x * width), int(y * height)]
    translated: Tensor = functions.affine(images, 0.0, pixels, 1.0, [0.0, 0.0])
    return translated


# The arguments are torchvision's functional transforms f, images x of shape (N, C, H, W), a
# strength m from 0 to 1, and a sign s. Some operations do not use strength or sign.
Operation = Callable[[Any, Tensor, float, int], Tensor]

OPERATIONS: tuple[Operation, ...] = (
    lambda f, x, m, s: x,
    lambda f, x, m, s: _shear(f, x, s * m * _SHEAR, 0.0),
    lambda f, x, m, s: _shear(f, x, 0.0, s * m * _SHEAR),
    lambda f, x, m, s: _translate(f, x, s * m * _SHIFT, 0.0),
    lambda f, x, m, s: _translate(f, x, 0.0, s * m * _SHIFT),
    lambda f, x, m, s: f.rotate(x, s * m * _DEGREES),
    lambda f, x, m, s: f.adjust_brightness(x, 1 + s * m * _BLEND),
    lambda f, x, m, s: f.adjust_saturation(x, 1 + s * m * _BLEND),
    lambda f, x, m, s: f.adjust_contrast(x, 1 + s * m * _BLEND),
    lambda f, x, m, s: f.adjust_sharpness(x, 1 + s * m * _BLEND),
    lambda f, x, m, s: f.posterize(x, 8 - round(_BITS * m)),
    lambda f, x, m, s: f.solarize(x, 255 * (1 - m)),
    lambda f, x, m, s: f.autocontrast(x),
    lambda f, x, m, s: f.equalize(x),
)
