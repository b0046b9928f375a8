"""Block quantisation in plain torch, for any device."""

import torch
from torch import Tensor

BLOCK = 128
_SMALLEST = torch.finfo(torch.float32).tiny
_LARGEST = torch.finfo(torch.float32).max


def encode(values: Tensor, levels: int, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scales and codes of 1-D values; see :mod:`.quantize`.

    Args:
        values: 1-D, of any floating-point dtype.
        levels: the largest code, 127 or 7.
        uniform: one float32 number in [0, 1) a value, or None for rounding to nearest.

    Returns:
        float32 scales; int8 codes, or uint8 pairs of them for 7 levels.
    """
    blocks = _blocks(values.float())
    scale = _scale(blocks, levels)
    # A zero or NaN scale makes infinities and NaN here: neither may reach the integers.
    quotient = (blocks / scale[:, None]).where((scale > 0)[:, None], 0.0).clamp_(-levels, levels)
    if uniform is None:
        rounded = quotient.round_()
    else:
        lower = quotient.floor()
        rounded = lower + (_blocks(uniform) < quotient - lower)
    codes = rounded.to(torch.int8).view(-1)[: values.numel()]
    return scale, _pairs(codes) if levels == 7 else codes


def decode(scale: Tensor, codes: Tensor, count: int) -> Tensor:
    """Code times scale, in float32; codes as :func:`encode` made them."""
    if codes.dtype == torch.uint8:
        codes = _singles(codes)[:count]
    return (_blocks(codes.float()) * scale[:, None]).view(-1)[:count]


def _blocks(values: Tensor) -> Tensor:
    padding = -values.numel() % BLOCK
    return torch.nn.functional.pad(values, (0, padding)).view(-1, BLOCK)


def _scale(blocks: Tensor, levels: int) -> Tensor:
    largest = blocks.abs().amax(1)
    # Divided by a tensor: CUDA takes division by a number as multiplication by its inverse.
    scale = largest / torch.full_like(largest, levels)
    scale = scale.clamp(max=largest_scale(levels)).where(scale >= _SMALLEST, 0.0)
    return scale.where(largest.isfinite(), torch.nan)


def largest_scale(levels: int) -> float:
    """Rounded up, the scale of the very largest values would decode them to infinity."""
    return _LARGEST * (1 - 2.0**-23) / levels


def _pairs(codes: Tensor) -> Tensor:
    nibbles = torch.nn.functional.pad(codes, (0, codes.numel() % 2)).view(torch.uint8) & 15
    return nibbles[::2] | (nibbles[1::2] << 4)


def _singles(pairs: Tensor) -> Tensor:
    nibbles = torch.stack([pairs & 15, pairs >> 4], 1).view(-1)
    return (nibbles ^ 8).to(torch.int8) - 8
