"""RandAugment on a whole batch, reproducible from (seed, epoch, step).

Cubuk, Zoph, Shlens, Le, "RandAugment: practical automated data augmentation with a reduced search
space", NeurIPS 2020. Every image gets some operations in a row, each drawn from the list below, all
of one strength. Operations and strengths are those of torchvision's class of this name, which works
on one image at a time; here all images with the same operation are changed together, after either
loader and on the images' device.
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

_STRONGEST = 30
_SHEAR, _SHIFT, _DEGREES, _BLEND, _BITS = 0.3, 150 / 331, 30.0, 0.9, 4


@dataclass(frozen=True)
class RandAugment:
    """``ops`` random operations of strength ``magnitude``, 0 to 30, on every training image."""

    ops: int
    magnitude: int
    order: TrainOrder

    def __call__(self, images: Tensor, epoch: int, step: int) -> Tensor:
        """Change this rank's images (N, H, W, C), as bytes, of one step."""
        if not self.ops:
            return images
        chosen, signs = self._drawn(epoch, step)
        planes = images.permute(0, 3, 1, 2).contiguous()
        for operations, directions in zip(chosen.T, signs.T, strict=True):
            _apply(planes, operations, directions, self.magnitude / _STRONGEST)
        return planes.permute(0, 2, 3, 1)

    def _drawn(self, epoch: int, step: int) -> tuple[Tensor, Tensor]:
        """Operations and signs (N, ops) of this rank, drawn for the images of all ranks."""
        seed = keyed_seed(RANDAUGMENT, self.order.seed, epoch, step)
        random = torch.Generator().manual_seed(seed)
        shape = (self.order.batch_size, self.ops)
        chosen = torch.randint(len(OPERATIONS), shape, generator=random)
        signs = torch.randint(2, shape, generator=random) * 2 - 1
        return chosen[self.order.mine], signs[self.order.mine]


def _apply(images: Tensor, chosen: Tensor, signs: Tensor, strength: float) -> None:
    functions = functional()
    for number, operation in enumerate(OPERATIONS):
        for sign in (-1, 1):
            rows = ((chosen == number) & (signs == sign)).nonzero().squeeze(1).to(images.device)
            if len(rows):
                images[rows] = operation(functions, images[rows], strength, sign)


def functional() -> Any:
    """Return torchvision's functional transforms."""
    import_torchvision()
    return importlib.import_module("torchvision.transforms.functional")


def _sheared(functions: Any, images: Tensor, x: float, y: float) -> Tensor:
    angles = [math.degrees(math.atan(x)), math.degrees(math.atan(y))]
    sheared: Tensor = functions.affine(images, 0.0, [0, 0], 1.0, angles, center=[0, 0])
    return sheared


def _shifted(functions: Any, images: Tensor, x: float, y: float) -> Tensor:
    height, width = images.shape[-2:]
    places = [int(x * width), int(y * height)]
    shifted: Tensor = functions.affine(images, 0.0, places, 1.0, [0.0, 0.0])
    return shifted


# Each takes torchvision's functions, images (N, C, H, W), a strength of 0 to 1 and a sign; some
# have no strength or no sign.
Operation = Callable[[Any, Tensor, float, int], Tensor]

OPERATIONS: tuple[Operation, ...] = (
    lambda f, x, m, s: x,
    lambda f, x, m, s: _sheared(f, x, s * m * _SHEAR, 0.0),
    lambda f, x, m, s: _sheared(f, x, 0.0, s * m * _SHEAR),
    lambda f, x, m, s: _shifted(f, x, s * m * _SHIFT, 0.0),
    lambda f, x, m, s: _shifted(f, x, 0.0, s * m * _SHIFT),
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
