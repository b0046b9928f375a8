"""The RandAugment operations of MosaicML's Composer 0.15.1, for images of different strengths.

The code of Gu et al., ICLR 2024 (arXiv 2310.14423), uses Composer's RandAugment with its set "all"
of 13 operations (github.com/hmgxr128/QSR, ``rand_augment.py`` and the defaults in ``main.py``). A
magnitude of at most 10 is the upper end of a level that every use draws:

- the level of a geometric operation, posterize and solarize is uniform in [0.1, magnitude];
- the factor of colour, contrast, brightness and sharpness is, with probability 1/2 each, uniform
  in [1, magnitude] or in [1 - 0.09 magnitude, 1].

Composer changes one Pillow image at a time. Here all images with the same operation are changed
together, each with its own strength. On the CPU the result is Pillow's, except that a byte of a
rotated or sheared image can differ by 1. It is written here from these facts, so Composer need not
be installed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import conv2d, grid_sample

from recipes.image_data.sources import vision

_MAX_MAGNITUDE = 10
_LEAST_LEVEL = 0.1
# What an operation does at the highest level.
_SHEAR, _SHIFT, _DEGREES, _BITS, _SOLARIZED = 0.3, 1 / 3, 30, 4, 256
# Pillow's weights of red, green and blue, in units of 2^-16.
_GREY = (19_595, 38_470, 7_471)


def _level(uniform: Tensor, magnitude: float) -> Tensor:
    return (_LEAST_LEVEL + uniform * (magnitude - _LEAST_LEVEL)) / _MAX_MAGNITUDE


def _factor(uniform: Tensor, signs: Tensor, magnitude: float) -> Tensor:
    stronger, weaker = 1 + uniform * (magnitude - 1), 1 - uniform * 0.09 * magnitude
    return torch.where(signs > 0, stronger, weaker)


def _per_image(values: Tensor, images: Tensor) -> Tensor:
    """Return ``values`` (N) in a shape that broadcasts over ``images`` (N, C, H, W)."""
    return values.to(images.device)[:, None, None, None]


# Geometric operations.


def _rotate(images: Tensor, uniform: Tensor, signs: Tensor, magnitude: float) -> Tensor:
    degrees = signs * (_DEGREES * _level(uniform, magnitude)).trunc()
    cos, sin = torch.deg2rad(degrees).cos(), torch.deg2rad(degrees).sin()
    x, y = images.shape[-1] / 2, images.shape[-2] / 2
    # Counterclockwise around the centre (x, y).
    return _affine(images, (cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y))


def _shear_x(images: Tensor, uniform: Tensor, signs: Tensor, magnitude: float) -> Tensor:
    return _affine(images, (1, signs * _SHEAR * _level(uniform, magnitude), 0, 0, 1, 0))


def _shear_y(images: Tensor, uniform: Tensor, signs: Tensor, magnitude: float) -> Tensor:
    return _affine(images, (1, 0, 0, signs * _SHEAR * _level(uniform, magnitude), 1, 0))


def _translate_x(images: Tensor, uniform: Tensor, signs: Tensor, magnitude: float) -> Tensor:
    return _affine(images, (1, 0, signs * _pixels(images.shape[-1], uniform, magnitude), 0, 1, 0))


def _translate_y(images: Tensor, uniform: Tensor, signs: Tensor, magnitude: float) -> Tensor:
    return _affine(images, (1, 0, 0, 0, 1, signs * _pixels(images.shape[-2], uniform, magnitude)))


def _pixels(extent: int, uniform: Tensor, magnitude: float) -> Tensor:
    return (extent * _SHIFT * _level(uniform, magnitude)).trunc()


def _affine(images: Tensor, matrix: Sequence[Tensor | float]) -> Tensor:
    """Read the pixel at (x, y) from (a x + b y + c, d x + e y + f), and black from outside."""
    count, _, height, width = images.shape
    numbers = torch.stack([torch.as_tensor(number).float().expand(count) for number in matrix])
    a, b, c, d, e, f = numbers.to(images.device)[:, :, None, None]
    # Pixels are squares of side 1, and their places are those of their centres.
    x = torch.arange(width, device=images.device) + 0.5
    y = torch.arange(height, device=images.device)[:, None] + 0.5
    from_x, from_y = a * x + b * y + c, d * x + e * y + f
    grid = torch.stack([2 * from_x / width - 1, 2 * from_y / height - 1], dim=-1)
    read = grid_sample(
        images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False
    )
    inside = (from_x >= 0) & (from_x < width) & (from_y >= 0) & (from_y < height)
    # Pillow truncates. The small shift keeps whole numbers, which float32 can miss from below.
    return (read * inside[:, None] + 1e-3).to(torch.uint8)


# Operations on colours.


def _posterize(images: Tensor, uniform: Tensor, signs: Tensor, magnitude: float) -> Tensor:
    bits = _BITS - (_BITS * _level(uniform, magnitude)).trunc()
    return images & _per_image((256 - 2 ** (8 - bits)).to(torch.uint8), images)


def _solarize(images: Tensor, uniform: Tensor, signs: Tensor, magnitude: float) -> Tensor:
    threshold = 256 - (_SOLARIZED * _level(uniform, magnitude)).trunc()
    return torch.where(images < _per_image(threshold, images), images, 255 - images)


def _autocontrast(images: Tensor, uniform: Tensor, signs: Tensor, magnitude: float) -> Tensor:
    # Not torchvision's, whose order of operations in float32 rounds some bytes differently.
    low, high = (
        each[..., None] for each in images.flatten(2).double().aminmax(dim=2, keepdim=True)
    )
    # Not 255 / (high - low), for which torch multiplies by a reciprocal.
    scale = high.new_tensor(255).div(high - low)
    stretched = (images.double() * scale - low * scale).clamp(0, 255)
    # A channel of one value does not change, as its scale is infinite.
    return torch.where(high > low, stretched.nan_to_num().to(torch.uint8), images)


def _equalize(images: Tensor, uniform: Tensor, signs: Tensor, magnitude: float) -> Tensor:
    changed: Tensor = vision().transforms.functional.equalize(images)
    return changed


def _brightness(images: Tensor, uniform: Tensor, signs: Tensor, magnitude: float) -> Tensor:
    factor = _factor(uniform, signs, magnitude)
    # Composer weakens brighter images only.
    factor = torch.where(factor > 1, 0.75 * factor, factor)
    return _blend(torch.zeros_like(images), images, factor)


def _color(images: Tensor, uniform: Tensor, signs: Tensor, magnitude: float) -> Tensor:
    return _blend(_grey(images), images, _factor(uniform, signs, magnitude))


def _contrast(images: Tensor, uniform: Tensor, signs: Tensor, magnitude: float) -> Tensor:
    mean = (_grey(images).double().mean((1, 2, 3), keepdim=True) + 0.5).floor()
    return _blend(mean, images, _factor(uniform, signs, magnitude))


def _sharpness(images: Tensor, uniform: Tensor, signs: Tensor, magnitude: float) -> Tensor:
    return _blend(_smoothed(images), images, _factor(uniform, signs, magnitude))


def _blend(degenerate: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """Move from ``degenerate`` (factor 0) to ``images`` (factor 1) and beyond."""
    start = degenerate.float()
    values = start + _per_image(factor.float(), images) * (images.float() - start)
    # Pillow truncates too, in float32.
    return values.clamp(0, 255).to(torch.uint8)


def _grey(images: Tensor) -> Tensor:
    if images.shape[1] == 1:
        return images
    weights = torch.tensor(_GREY, dtype=torch.int32, device=images.device)[:, None, None]
    return ((images.int() * weights).sum(1, keepdim=True) + 2**15) >> 16


def _smoothed(images: Tensor) -> Tensor:
    """Return weighted means of 3 x 3 pixels. The pixels of the border do not change."""
    channels = images.shape[1]
    kernel = torch.ones(channels, 1, 3, 3, device=images.device)
    kernel[:, :, 1, 1] = 5
    inner = conv2d(images.float(), kernel, groups=channels) / 13
    smoothed = images.clone()
    smoothed[..., 1:-1, 1:-1] = (inner + 0.5).to(torch.uint8)
    return smoothed


OPERATIONS = (
    _autocontrast,
    _equalize,
    _posterize,
    _rotate,
    _solarize,
    _shear_x,
    _shear_y,
    _translate_x,
    _translate_y,
    _color,
    _contrast,
    _brightness,
    _sharpness,
)
