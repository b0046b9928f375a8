"""Quantize the values of a message to 16, 8 or 4 bits, in the formats of docs/wire.md.

"int8" and "int4" split the values into blocks of 128; the last block can be shorter:

    scale = max |v| / L       in float32, L = 127 for int8 and 7 for int4
    code  = round(v / scale)  an integer in [-L, L]; int8 has one code per byte, int4 has two

A scale below 2^-126 counts as 0: float32 has no full accuracy there, and the result must not depend
on whether the processor flushes subnormal numbers. A NaN or an infinity makes the whole block NaN.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchcomp.kernels import backend
from torchcomp.kernels.cast import narrow
from torchcomp.kernels.segments import Prepared, ascend, batches, part, split, stacked
from torchcomp.routes.wire import Field, Layout, Parts

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


def encode(values: Tensor, fmt: str | None, noise: Tensor | None) -> Parts:
    """Encode the values of a message as the fields that :func:`layout` describes."""
    if fmt not in LEVELS:
        return (values if fmt is None else narrow(values, CASTS[fmt]),)
    levels, count = LEVELS[fmt], values.numel()
    blocks = _blocks(values.float()[None])[0]
    scale = _scale(blocks, levels)
    # Division by a zero or NaN scale gives infinities and NaN. Their conversion to an integer is
    # undefined, so replace them first.
    quotient = (blocks / scale[:, None]).where((scale > 0)[:, None], 0.0).clamp_(-levels, levels)
    if noise is None:
        rounded = quotient.round_()
    else:
        lower = quotient.floor()
        rounded = lower + (_blocks(noise[None])[0] < quotient - lower)
    # The last block ends in zeros that are not sent.
    codes = rounded.to(torch.int8).view(-1)
    if fmt == "int8":
        return scale, codes[:count]
    nibbles = codes.view(torch.uint8) & 15
    return scale, (nibbles[::2] | (nibbles[1::2] << 4))[: (count + 1) // 2]


def decode(messages: Sequence[Sequence[Tensor]], count: int, dtype: torch.dtype) -> Tensor:
    """Decode messages of `count` values, a row for each: code times scale in float32."""
    fields = [stacked(own) for own in zip(*messages, strict=True)]
    if len(fields) == 1:
        return fields[0].to(dtype)
    scale, codes = fields
    if codes.dtype == torch.uint8:
        # (nibble ^ 8) - 8 extends the sign of a 4-bit two's complement number.
        nibbles = torch.stack([codes & 15, codes >> 4], 2).flatten(1)[:, :count]
        codes = (nibbles ^ 8).to(torch.int8) - 8
    values = _blocks(codes).float() * scale[:, :, None]
    return values.flatten(1)[:, :count].to(dtype)


def _blocks(rows: Tensor) -> Tensor:
    """Return rows in blocks of 128 values. The last block is filled up with zeros."""
    filling = -rows.shape[1] % BLOCK
    return torch.nn.functional.pad(rows, (0, filling)).view(len(rows), -1, BLOCK)


def _scale(blocks: Tensor, levels: int) -> Tensor:
    largest = blocks.abs().amax(1)
    # Divide by a tensor: CUDA computes a division by a number as a product with its reciprocal,
    # which rounds differently from the CPU.
    scale = largest / torch.full_like(largest, levels)
    scale = scale.clamp(max=largest_scale(levels)).where(scale >= _SMALLEST, 0.0)
    return scale.where(largest.isfinite(), torch.nan)


def largest_scale(levels: int) -> float:
    """Return the largest scale at which the code `levels` still decodes to a finite float32."""
    return _LARGEST * (1 - 2.0**-23) / levels


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


def quantizer_for(vectors: Prepared, fmt: str) -> "Quantizer":
    """Return the fastest kernels for the vectors of a tensor."""
    triton = backend.device_form("elementwise", torch.empty(0, device=vectors.device))
    if triton and ascend(vectors.segments):
        return triton.ElementwiseTriton(vectors, fmt)  # type: ignore[no-any-return]
    return Quantizer(vectors, fmt)


class Quantizer:
    """The kernels in plain torch or, on a CPU, in Numba."""

    reads_frames = False

    def __init__(self, vectors: Prepared, fmt: str) -> None:
        self.vectors, self.fmt = vectors, fmt
        self._counts = [segment.n for segment in vectors.segments]
        form: Any = backend.host_form("quantize", torch.empty(0, device=vectors.device))
        self._encode: Any = form.encode if form else encode
        self._decode: Any = form.decode if form else decode

    def encode(self, x: Tensor, noise: Tensor | None) -> Sequence[Parts]:
        """Return the fields of each vector of `x`."""
        segments, counts = self.vectors.segments, self._counts
        drawn = [None] * len(counts) if noise is None else split(noise, counts)
        return [
            self._encode(part(x, segment), self.fmt, own)
            for segment, own in zip(segments, drawn, strict=True)
        ]

    def encode_sum(
        self, g: Tensor, e: Tensor, rest: Tensor, noise: Tensor | None
    ) -> Sequence[Parts]:
        """Encode ``g + e``, and write to `rest` what the message does not contain."""
        torch.add(g, e, out=rest)
        parts = self.encode(narrow(rest, self.vectors.dtype), noise)
        self.subtract(parts, rest, 1.0)
        return parts

    def subtract(self, parts: Sequence[Parts], x: Tensor, weight: float) -> None:
        """Subtract `weight` times the decoded message from `x`."""
        self.accumulate((parts,), x, -weight)

    def accumulate(
        self, messages: Sequence[Sequence[Parts]], out: Tensor, weight: float = 1.0
    ) -> None:
        for i, segment in enumerate(self.vectors.segments):
            own = part(out, segment)
            for some in batches(messages, i, segment.n):
                for values in self._decode(some, segment.n, out.dtype):
                    own.add_(values, alpha=weight)
