"""Frames in Triton: how kernels write the values of messages to frames, and read them there.

The formats are those of :mod:`.quantize`. Fields can begin at any byte of a frame.
"""

from typing import Any

import torch
import triton.language as tl

from torchcomp.kernels.quantize import CASTS, LEVELS, layout
from torchcomp.kernels.triton_jit import INFINITY, kernel, narrowed, number

TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}

# Offsets are 32-bit, also those of bits in an index code.
LIMIT = 2**30
"""A vector must have fewer elements."""

DTYPES = tuple(TYPES)
"""Supported dtypes of vectors and values. Others, such as float64, run in plain torch."""


class Format:
    """Constants of kernels for the values of messages."""

    def __init__(self, fmt: str | None, dtype: torch.dtype) -> None:
        self.fmt, self.dtype = fmt, dtype
        self.levels = 0 if fmt is None else LEVELS.get(fmt, 0)
        self.value = CASTS.get(fmt, dtype) if fmt is not None else dtype
        self.width = 4 if self.levels else self.value.itemsize
        """Size in bytes of a number of the first field. One of the second field has one byte."""
        self.aligned = True

    @property
    def constants(self) -> dict[str, Any]:
        """What kernels need to know."""
        return {"VALUE": TYPES[self.value], "LEVELS": self.levels, "ALIGNED": self.aligned}

    def second(self, k: int) -> int:
        """Return the size in bytes of the first field of `k` values, where the second begins."""
        return layout(self.fmt, k, self.dtype)[0].nbytes

    def nbytes(self, k: int) -> int:
        """Return the size in bytes of the fields of `k` values."""
        return sum(field.nbytes for field in layout(self.fmt, k, self.dtype))


@kernel()
def put(field, i, bits, mask, ALIGNED: tl.constexpr):
    """Store the bits of numbers, int16 or int32, as the numbers `i` of a field."""
    if ALIGNED:
        tl.store(field.to(tl.pointer_type(bits.dtype)) + i, bits, mask=mask)
    else:
        size: tl.constexpr = 4 if bits.dtype == tl.int32 else 2
        for byte in tl.static_range(size):
            tl.store(field + size * i + byte, (bits >> (8 * byte)).to(tl.uint8), mask=mask)


@kernel()
def get(field, i, mask, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the numbers `i` of a field of floating-point numbers, in float32."""
    if ALIGNED:
        return number(tl.load(field.to(tl.pointer_type(dtype)) + i, mask=mask, other=0.0))
    else:
        size: tl.constexpr = 4 if dtype == tl.float32 else 2
        bits = tl.zeros_like(i).to(tl.int32)
        for byte in tl.static_range(size):
            loaded = tl.load(field + size * i + byte, mask=mask, other=0)
            bits |= loaded.to(tl.int32) << (8 * byte)
        if size == 2:
            return number(bits.to(tl.int16).to(dtype, bitcast=True))
        else:
            return bits.to(tl.float32, bitcast=True)


@kernel()
def bits_of(x, dtype: tl.constexpr):
    """Return the bits of float32 values that `dtype` can represent, in `dtype`."""
    if dtype == tl.bfloat16:
        return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    elif dtype == tl.float16:
        return x.to(tl.float16).to(tl.int16, bitcast=True)
    else:
        return x.to(tl.int32, bitcast=True)


@kernel()
def values_of(
    first, second, i, mask, LEVELS: tl.constexpr, VALUE: tl.constexpr, ALIGNED: tl.constexpr
):
    """Return the values `i` of a message in float32, from both of its fields."""
    if LEVELS == 0:
        return get(first, i, mask, VALUE, ALIGNED)
    else:
        if LEVELS == 7:
            pair = tl.load(second + i // 2, mask=mask, other=0).to(tl.int32)
            code = (((pair >> (4 * (i & 1)).to(tl.int32)) & 15) ^ 8) - 8  # with its sign
        else:
            code = tl.load(second + i, mask=mask, other=0).to(tl.int8, bitcast=True).to(tl.int32)
        scale = get(first, i // 128, mask, tl.float32, ALIGNED)
        return code.to(tl.float32) * scale


@kernel()
def scale_of(low, high, largest_scale, LEVELS: tl.constexpr):
    """Return the scale of each row of values, of which `low` and `high` are two halves."""
    # The largest magnitude by its bits: those of NaN and infinity are the largest.
    bits = low.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    bits = tl.max(tl.maximum(bits, high.to(tl.int32, bitcast=True) & 0x7FFFFFFF), 1)
    largest = bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, tl.full(largest.shape, LEVELS, tl.float32))
    scale = tl.where(scale >= 2.0**-126, tl.minimum(scale, largest_scale), 0.0)
    # With the bits of torch.nan.
    scale = tl.where(bits < INFINITY, scale.to(tl.int32, bitcast=True), 0x7FC00000)
    return scale.to(tl.float32, bitcast=True)


@kernel()
def code_of(value, drawn, scale, RANDOM: tl.constexpr, LEVELS: tl.constexpr):
    """Return the codes of values; `scale` has one row for each row of values."""
    # Division by a zero or NaN scale would give infinities and NaN, which have no integer.
    divisor = tl.where(scale > 0, scale, 1.0) + tl.zeros_like(value)
    quotient = tl.div_rn(tl.where(scale > 0, value, 0.0), divisor)
    quotient = tl.minimum(tl.maximum(quotient, -LEVELS * 1.0), LEVELS * 1.0)
    if RANDOM:
        code = tl.floor(quotient)
        code += tl.where(drawn < quotient - code, 1.0, 0.0)
    else:
        # Above 2^23, float32 has no fractions: adding it rounds, half to even.
        code = (quotient + 12582912.0) - 12582912.0
    return code.to(tl.int32)


@kernel()
def written(
    first, second, block, even, k, low, high, drawn_low, drawn_high, largest_scale,
    SOURCE: tl.constexpr, VALUE: tl.constexpr, LEVELS: tl.constexpr, RANDOM: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Encode values and write their fields. Return the decoded values, in float32."""
    if LEVELS == 0:
        low = narrowed(low, SOURCE, VALUE)
        high = narrowed(high, SOURCE, VALUE)
        put(first, even, bits_of(low, VALUE), even < k, ALIGNED)
        put(first, even + 1, bits_of(high, VALUE), even + 1 < k, ALIGNED)
        return low, high
    else:
        scale = scale_of(low, high, largest_scale, LEVELS)
        put(first, block, scale.to(tl.int32, bitcast=True), block * 128 < k, ALIGNED)
        low_code = code_of(low, drawn_low, scale[:, None], RANDOM, LEVELS)
        high_code = code_of(high, drawn_high, scale[:, None], RANDOM, LEVELS)
        if LEVELS == 7:
            pair = (low_code & 15) | ((high_code & 15) << 4)
            tl.store(second + even // 2, pair.to(tl.uint8), mask=even < k)
        else:
            tl.store(second + even, low_code.to(tl.uint8), mask=even < k)
            tl.store(second + even + 1, high_code.to(tl.uint8), mask=even + 1 < k)
        return low_code.to(tl.float32) * scale[:, None], high_code.to(tl.float32) * scale[:, None]
