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
Numba :mod:`.quantize_numba` does the work; elsewhere, accelerators included, plain torch does
(:mod:`.quantize_torch`), with the same results.
"""

import functools
import math
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from torchcomp.kernels import quantize_torch
from torchcomp.kernels.backend import numba_form
from torchcomp.kernels.cast import narrow
from torchcomp.wire import Field, Layout, Parts

BLOCK = quantize_torch.BLOCK
"""Values that share a scale."""

LEVELS = {"int8": 127, "int4": 7}
CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
_PRECISION = {"bf16": 8, "fp16": 11}
FORMATS = (*CASTS, *LEVELS)


def layout(fmt: str, count: int) -> Layout:
    """The fields that `count` values take.

    Raises:
        ValueError: if there is no such format.
    """
    _check(fmt)
    if fmt in CASTS:
        return (Field("values", CASTS[fmt], count),)
    scale = Field("scale", torch.float32, -(-count // BLOCK))
    if fmt == "int4":
        return (scale, Field("codes", torch.uint8, (count + 1) // 2))
    return (scale, Field("codes", torch.int8, count))


def encode(
    values: Tensor, fmt: str, noise: np.random.Generator | None, index: Tensor | None = None
) -> Parts:
    """The fields for some values.

    Args:
        values: 1-D, of any floating-point dtype.
        fmt: one of FORMATS.
        noise: None rounds to the nearest level, half to even. A generator rounds up or down at
            random so that the mean is the value, to within 2^-24 of a level.
        index: 1-D int64: encodes ``values[index]`` instead.

    Returns:
        Tensors as :func:`layout` announces them.

    Raises:
        ValueError: if there is no such format, or if noise is given for one without levels.
        IndexError: on a CPU, if the index is out of bounds.
    """
    _check(fmt)
    if index is not None:
        values = values.index_select(0, index)
    if fmt in CASTS:
        if noise is not None:
            raise ValueError(f"{fmt} has no evenly spaced levels to choose between at random")
        return (narrow(values, CASTS[fmt]),)
    uniform = None if noise is None else noise.random(values.numel(), dtype=np.float32)
    fast = _fast(values)
    if fast is not None:
        return fast.encode(values, LEVELS[fmt], uniform)  # type: ignore[no-any-return]
    drawn = None if uniform is None else torch.from_numpy(uniform).to(values.device)
    return quantize_torch.encode(values, LEVELS[fmt], drawn)


def decode(parts: Parts, count: int, fmt: str, dtype: torch.dtype) -> Tensor:
    """The values that a message stands for.

    Args:
        parts: fields as :func:`layout` announces them, with any contents.
        count: number of values.
        fmt: one of FORMATS.
        dtype: of the result; for int8 and int4 the product is taken in float32 before.

    Returns:
        1-D tensor of `count` elements.

    Raises:
        ValueError: if there is no such format, or if the parts do not fit its layout.
    """
    check_fields(parts, count, fmt)
    if fmt in CASTS:
        return parts[0].to(dtype)
    scale, codes = parts
    form = _fast(codes) or quantize_torch
    return form.decode(scale, codes, count).to(dtype)  # type: ignore[no-any-return]


def check_fields(parts: Parts, count: int, fmt: str) -> None:
    """Require the fields of `count` values.

    Raises:
        ValueError: if there is no such format, or if the parts do not fit its layout.
    """
    if _announced(fmt, count) != tuple((part.dtype, part.numel()) for part in parts):
        raise ValueError(f"these are not the fields of {count} values as {fmt}")


@functools.lru_cache
def _announced(fmt: str, count: int) -> tuple[tuple[torch.dtype, int], ...]:
    return tuple((field.dtype, field.count) for field in layout(fmt, count))


def error_bound(fmt: str, count: int) -> float:
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

    Raises:
        ValueError: if there is no such format.
    """
    _check(fmt)
    if fmt in CASTS:
        return 4.0 ** -_PRECISION[fmt]
    others = max(min(BLOCK, count) - 1, 0)
    exact = (math.sqrt(1 + others / LEVELS[fmt] ** 2) - 1) / 2
    return (math.sqrt(exact) + 2.0**-20) ** 2


def _check(fmt: str) -> None:
    if fmt not in FORMATS:
        raise ValueError(f"values travel as {', '.join(FORMATS)}, not as {fmt!r}")


def _fast(tensor: Tensor) -> ModuleType | None:
    """The module that works on this tensor faster than plain torch, if any."""
    return numba_form("quantize") if tensor.device.type == "cpu" else None
