"""Quantize the values of a message to 16, 8 or 4 bits.

"bf16" and "fp16" round each value separately. "int8" and "int4" split the values into blocks of
128; the last block can be shorter. For each block they send

    scale = max |v| / L       in float32, L = 127 for int8 and 7 for int4
    code  = round(v / scale)  an integer in [-L, L]; int8 has one code per byte, int4 has two

int4 codes are in two's complement. The first code of a pair is in the low four bits. An odd count
is padded with a zero code. A message decodes to code * scale in float32, which depends on nothing
else. Sender and receiver therefore agree on the residual of error feedback, v - decode(encode(v)).

Special values:

- A NaN or an infinity in a block makes its scale NaN, so the whole block decodes to NaN.
- A scale below 2^-126 counts as 0, so a block with all values below L 2^-126 decodes to zeros.
  float32 has no full accuracy there. The result must not depend on whether the processor flushes
  subnormal numbers.
- bf16 and fp16 clamp finite values to their largest finite value (3.39e38 and 65,504). NaN and
  infinities stay.

Blocks are independent, and the values of a block depend on each other only through their maximum.
On a CPU with Numba, :mod:`.quantize_numba` runs. Everywhere else, accelerators included, plain
torch runs, with the same results.
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
"""Number of values that share a scale."""

LEVELS = {"int8": 127, "int4": 7}
CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Bits of the significand, with the implicit leading one.
_PRECISION = {"bf16": 8, "fp16": 11}
FORMATS = (*CASTS, *LEVELS)
ROUNDINGS = ("nearest", "stochastic")  # for LEVELS
_SMALLEST = torch.finfo(torch.float32).tiny
_LARGEST = torch.finfo(torch.float32).max


def layout(fmt: str | None, count: int, dtype: torch.dtype) -> Layout:
    """Return the fields of `count` values in one of FORMATS, or in `dtype` if `fmt` is None."""
    if fmt not in LEVELS:
        return (Field("values", dtype if fmt is None else CASTS[fmt], count),)
    scale = Field("scale", torch.float32, -(-count // BLOCK))
    if fmt == "int4":
        return (scale, Field("codes", torch.uint8, (count + 1) // 2))
    return (scale, Field("codes", torch.int8, count))


def encode(
    values: Tensor, fmt: str | None, noise: np.random.Generator | None, index: Tensor | None = None
) -> Parts:
    """Encode 1-D floating-point values as the fields that :func:`layout` describes.

    Args:
        values: 1-D, of any floating-point dtype.
        fmt: one of FORMATS, or None for the values' own dtype.
        noise: None rounds to the nearest level, half to even. For "int8" and "int4", a generator
            rounds up or down at random. The mean is then the value, to within 2^-24 of a level.
        index: 1-D int64, within bounds. If given, encode ``values[index]`` instead.
    """
    fast = backend.fast_form("quantize", values.device.type) if fmt in LEVELS else None
    # The Numba form reads float32 values through the index, which saves a copy of them.
    if index is not None and not (fast and values.dtype == torch.float32):
        values, index = values.index_select(0, index), None
    if fmt not in LEVELS:
        return (values if fmt is None else narrow(values, CASTS[fmt]),)
    count, levels = (values if index is None else index).numel(), LEVELS[fmt]
    # Drawn by NumPy on every device, so that all forms round in the same direction.
    uniform = None if noise is None else noise.random(count, dtype=np.float32)
    if fast is not None:
        encoded: Parts = fast.encode(values, levels, uniform, index)
        return encoded
    blocks = _blocks(values.float())
    scale = _scale(blocks, levels)
    # Division by a zero or NaN scale gives infinities and NaN. Their conversion to an integer is
    # undefined, so replace them first.
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
    """Decode fields of any contents to `count` values of `dtype`.

    The product of code and scale is computed in float32 and then converted.
    """
    if len(parts) == 1:
        return parts[0].to(dtype)
    scale, codes = parts
    fast = backend.fast_form("quantize", codes.device.type)
    if fast is not None:
        decoded: Tensor = fast.decode(scale, codes, count)
        return decoded.to(dtype)
    if codes.dtype == torch.uint8:
        # (nibble ^ 8) - 8 extends the sign of a 4-bit two's complement number.
        nibbles = torch.stack([codes & 15, codes >> 4], 1).view(-1)[:count]
        codes = (nibbles ^ 8).to(torch.int8) - 8
    return (_blocks(codes.float()) * scale[:, None]).view(-1)[:count].to(dtype)


def _blocks(values: Tensor) -> Tensor:
    padding = -values.numel() % BLOCK
    return torch.nn.functional.pad(values, (0, padding)).view(-1, BLOCK)


def _scale(blocks: Tensor, levels: int) -> Tensor:
    largest = blocks.abs().amax(1)
    # Divide by a tensor: CUDA computes a division by a number as a product with its reciprocal,
    # which rounds differently from the CPU.
    scale = largest / torch.full_like(largest, levels)
    scale = scale.clamp(max=largest_scale(levels)).where(scale >= _SMALLEST, 0.0)
    return scale.where(largest.isfinite(), torch.nan)


def largest_scale(levels: int) -> float:
    """Return the largest scale at which the code `levels` still decodes to a finite float32.

    The scale of the largest float32 values could be rounded up, and would decode them to infinity.
    """
    return _LARGEST * (1 - 2.0**-23) / levels


def _pairs(codes: Tensor) -> Tensor:
    nibbles = torch.nn.functional.pad(codes, (0, codes.numel() % 2)).view(torch.uint8) & 15
    return nibbles[::2] | (nibbles[1::2] << 4)


def error_bound(fmt: str | None, count: int) -> float:
    """Return a delta with E|decode(encode(v)) - v|^2 <= delta |v|^2, decoded to float32 or wider.

    *bf16 and fp16.* The bound is true if every value is 0 or has full precision: its magnitude is
    at least 2^-126 or 2^-14, and at most the format's largest. The error of each value is then at
    most half a unit in the last place, 2^-p of the value with p bits of precision.

    *int8 and int4.* The bound is true, with both ways of rounding, if every block is zero or has a
    largest magnitude of at least L 2^-126. Proof for a block, in units of its scale: the largest
    value is L and exact. Each of the at most C = min(128, count) - 1 other values lies a fraction p
    above a level m >= 0, in magnitude. Its mean squared error is p (1 - p) if rounded at random.
    If rounded to nearest it is min(p, 1 - p)^2, which is not larger. For every d > 0,

        p (1 - p) - d (m + p)^2  <=  p - (1 + d) p^2  <=  1 / (4 (1 + d)).

    Summed over the block, E|error|^2 - d |v|^2 <= C / (4 (1 + d)) - d L^2. The right-hand side is
    zero for d (1 + d) = C / (4 L^2), that is d = (sqrt(1 + C / L^2) - 1) / 2.

    float32 rounds the scale, the quotient, the product and a float64 input, each by a relative
    2^-24. Together this is less than 2^-20 |v|, which adds to sqrt(d) by the triangle inequality.
    """
    if fmt is None:
        return 0.0
    if fmt in CASTS:
        return 4.0 ** -_PRECISION[fmt]
    others = max(min(BLOCK, count) - 1, 0)
    # `exact` is the solution d of the docstring. 2^-20 is the bound on float32's own rounding.
    exact = (math.sqrt(1 + others / LEVELS[fmt] ** 2) - 1) / 2
    return (math.sqrt(exact) + 2.0**-20) ** 2
