"""torchvision's RandAugment operations, for images that share a strength.

torchvision changes one image at a time. Here all images with the same operation and sign are
changed together. The strength is a magnitude from 0 to 30, the same in every use. The sign is
drawn.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchcomp.advisor.torchvision_compat import functional

_MAX_MAGNITUDE = 30
# torchvision's values at the maximum magnitude.
_SHEAR, _SHIFT, _DEGREES, _BLEND, _BITS = 0.3, 150 / 331, 30.0, 0.9, 4

# The arguments are torchvision's functional transforms f, images x of shape (N, C, H, W), a
# strength m from 0 to 1, and a sign s. Some operations do not use strength or sign.
_Change = Callable[[Any, Tensor, float, int], Tensor]


def _operation(change: _Change) -> Callable[[Tensor, Tensor, Tensor, float], Tensor]:
    def change_each(images: Tensor, uniform: Tensor, signs: Tensor, magnitude: float) -> Tensor:
        changed = torch.empty_like(images)
        # One call per sign: torchvision's functions take one strength per call.
        for sign in (-1, 1):
            rows = (signs == sign).nonzero().squeeze(1).to(images.device)
            if len(rows):
                changed[rows] = change(functional(), images[rows], magnitude / _MAX_MAGNITUDE, sign)
        return changed

    return change_each


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


_CHANGES: tuple[_Change, ...] = (
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
OPERATIONS = tuple(_operation(change) for change in _CHANGES)
