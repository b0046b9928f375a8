"""Values of a message in 16, 8 or 4 bits.

"bf16" and "fp16" round each value by itself. "int8" and "int4" cut the values into blocks of 128,
the last one shorter, and send for each block

    scale = max |v| / L       in float32, L = 127 for int8 and 7 for int4
    code  = round(v / scale)  a whole number in [-L, L], one a byte or two a byte

int4 codes are in two's complement, the first of a pair in the low four bits; an odd count is
filled up with zero. What a message decodes to, code * scale in float32, depends on nothing else, so
what error feedback keeps, v - decode(encode(v)), is the same on sender and receiver.

*Corners.* A NaN or an infinity in a block makes its scale NaN, so the whole block decodes to NaN.
A scale below 2^-126 counts as 0, so a block whose values are all below L 2^-126 decodes to zeros:
no accuracy is pretended where float32 has none, and it does not matter whether the processor
flushes subnormal numbers. bf16 and fp16 turn finite values beyond their largest (3.39e38 and
65,504) into that, while NaN and infinities stay.

The blocks are independent, and so are the values of a block but for their maximum. On a CPU with
Numba :mod:`.quantize_numba` does the work; elsewhere, accelerators included, plain torch does, with
the same results.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from torchcomp.kernels import backend
from torchcomp.kernels.cast import narrow
from torchcomp.wire import Field, Layout, Parts

BLOCK = 128
"""Values that share a scale."""

LEVELS = {"int8": 127, "int4": 7}
CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
_PRECISION = {"bf16": 8, "fp16": 11}
FORMATS = (*CASTS, *LEVELS)
_SMALLEST = torch.finfo(torch.float32).tiny
_LARGEST = torch.finfo(torch.float32).max


def layout(fmt: str | None, count: int, dtype: torch.dtype) -> Layout:
    """The fields of `count` values in one of FORMATS, or with None in their own `dtype`."""
    if fmt not in LEVELS:
        return (Field("values", dtype if fmt is None else CASTS[fmt], count),)
    scale = Field("scale", torch.float32, -(-count // BLOCK))
    if fmt == "int4":
        return (scale, Field("codes", torch.uint8, (count + 1) // 2))
    return (scale, Field("codes", torch.int8, count))


def encode(
    values: Tensor, fmt: str | None, noise: np.random.Generator | None, index: Tensor | None = None
) -> Parts:
    """The fields of 1-D floating-point values, as :func:`layout` announces them.

    Args:
        values: 1-D, of any floating-point dtype.
        fmt: one of FORMATS, or None for the values' own dtype.
        noise: None rounds to the nearest level, half to even. For "int8" and "int4", a generator
            rounds up or down at random so that the mean is the value, to within 2^-24 of a level.
        index: 1-D int64, within bounds: encodes ``values[index]`` instead.
    """
    fast = backend.fast_form("quantize", values.device.type) if fmt in LEVELS else None
    if index is not None and not (fast and values.dtype == torch.float32):
        values, index = values.index_select(0, index), None
    if fmt not in LEVELS:
        return (values if fmt is None else narrow(values, CASTS[fmt]),)
    count, levels = (values if index is None else index).numel(), LEVELS[fmt]
    uniform = None if noise is None else noise.random(count, dtype=np.float32)
    if fast is not None:
        encoded: Parts = fast.encode(values, levels, uniform, index)
        return encoded
    blocks = _blocks(values.float())
    scale = _scale(blocks, levels)
    # A zero or NaN scale makes infinities and NaN here: neither may reach the integers.
    quotient = (blocks / scale[:, None]).where((scale > 0)[:, None], 0.0).clamp_(-levels, levels)
    if uniform is None:
        rounded = quotient.round_()
    else:
        lower = quotient.floor()
        drawn = torch.from_numpy(uniform).to(values.device)
        rounded = lower + (_blocks(drawn) < quotient - lower)
    codes = rounded.to(torch.int8).view(-1)[:count]
    return scale, codes if fmt == "int8" else _pairs(codes)


def decode(parts: Sequence[Tensor], count: int, dtype: torch.dtype) -> Tensor:
    """The `count` values, of a dtype, that fields with any contents stand for.

    The product of code and scale is taken in float32 before.
    """
    if len(parts) == 1:
        return parts[0].to(dtype)
    scale, codes = parts
    fast = backend.fast_form("quantize", codes.device.type)
    if fast is not None:
        decoded: Tensor = fast.decode(scale, codes, count)
        return decoded.to(dtype)
    if codes.dtype == torch.uint8:
        nibbles = torch.stack([codes & 15, codes >> 4], 1).view(-1)[:count]
        codes = (nibbles ^ 8).to(torch.int8) - 8
    return (_blocks(codes.float()) * scale[:, None]).view(-1)[:count].to(dtype)


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


def error_bound(fmt: str | None, count: int) -> float:
    """A delta with E|decode(encode(v)) - v|^2 <= delta |v|^2, decoded to float32 or wider.

    For bf16 and fp16 it holds where every value is 0 or of full precision, at least 2^-126 or 2^-14
    in magnitude and at most the format's largest; each value is then off by at most half a unit in
    its last place, 2^-p of itself with p bits of precision.

    For int8 and int4 it holds, with both ways of rounding, where every block is zero or has a
    largest magnitude of at least L 2^-126. Proof for a block, in units of its scale: the largest
    value is L and exact. Each of the at most C = min(128, count) - 1 others lies a fraction p above
    a level m >= 0, in magnitude. Its squared error is p (1 - p) in the mean if rounded at random
    and min(p, 1 - p)^2, which is no more, if to nearest. For every d > 0,

        p (1 - p) - d (m + p)^2  <=  p - (1 + d) p^2  <=  1 / (4 (1 + d)).

    Summed over the block, E|error|^2 - d |v|^2 <= C / (4 (1 + d)) - d L^2, which is zero for
    d (1 + d) = C / (4 L^2), that is d = (sqrt(1 + C / L^2) - 1) / 2.

    Float32 rounds the scale, the quotient, the product and a float64 input, each by 2^-24 of
    itself: together less than 2^-20 |v|, which adds to sqrt(d) by the triangle inequality.
    """
    if fmt is None:
        return 0.0
    if fmt in CASTS:
        return 4.0 ** -_PRECISION[fmt]
    others = max(min(BLOCK, count) - 1, 0)
    exact = (math.sqrt(1 + others / LEVELS[fmt] ** 2) - 1) / 2
    return (math.sqrt(exact) + 2.0**-20) ** 2
