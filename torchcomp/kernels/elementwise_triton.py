"""Messages of all elements of a vector in Triton, for CUDA; prepared once, one launch each.

Results equal those of plain torch bit for bit. Bytes moved per float32 element: encoding reads two
summands and writes rest and message, 13 for int8. A mean reads all messages and writes 4.
"""

from collections.abc import Sequence
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchcomp.kernels import table_triton as col
from torchcomp.kernels.frames_triton import DTYPES, TYPES, values_of, written
from torchcomp.kernels.launch import Launch
from torchcomp.kernels.quantize import Quantizer, largest_scale
from torchcomp.kernels.table_triton import SIZES, InFrames, column, segment_of
from torchcomp.kernels.triton_jit import clamped, kernel, narrowed, number, rounded, within
from torchcomp.routes.wire import Parts

__all__ = ["DTYPES", "CastSum", "ElementwiseTriton"]

_BLOCK = 1024
"""Elements per program where there are no blocks of values."""


class ElementwiseTriton(InFrames, Quantizer):
    """See :class:`.quantize.Quantizer`. The segments cover the vector."""

    def _prepare(self, numel: int) -> None:
        super()._prepare(numel)
        self._programs = self._table.programs["fill"]
        places = [
            (s.start, s.n, offset, offset + self._format.second(s.n))
            for s, offset in zip(self.vectors.segments, self._offsets, strict=True)
        ]
        # What all lengths and places are multiples of: wide accesses need 16.
        self._step = gcd(16, *(number for place in places for number in place))
        self._launches: dict[tuple[Any, ...], Launch] = {}

    def encode(self, x: Tensor, noise: Tensor | None) -> Sequence[Parts]:
        frame = self._frame(x)
        return super().encode(x, noise) if frame is None else self._write(x, x, x, frame, noise)

    def encode_sum(
        self, g: Tensor, e: Tensor, rest: Tensor, noise: Tensor | None
    ) -> Sequence[Parts]:
        frame = self._frame(g, e, rest)
        if frame is None:
            return super().encode_sum(g, e, rest, noise)
        return self._write(g, e, rest, frame, noise)

    def _write(
        self, g: Tensor, e: Tensor, x: Tensor, frame: Tensor, noise: Tensor | None
    ) -> Sequence[Parts]:
        """Write the message of ``g + e``, and to `x` what it lacks; of `g` alone if that is `x`."""
        kind = "encode", g is not x, noise is not None
        launch = self._launches.get(kind)
        if launch is None:
            launch = self._made(
                kind, _encode, largest_scale(self._format.levels), ADD=kind[1],
                RANDOM=kind[2], SOURCE=TYPES[self._format.dtype],
            )  # fmt: skip
        if self._programs:
            launch(g, e, x, frame, g if noise is None else noise)
        return self._placed  # type: ignore[no-any-return]

    def subtract(self, parts: Sequence[Parts], x: Tensor, weight: float) -> None:
        frames = self.vectors.frames
        if frames is None or parts is not self._placed:
            super().subtract(parts, x, weight)
        elif not self._ready(x):
            super().subtract(frames.unpack(frames.outgoing)[0], x, weight)
        else:
            self._add_up(frames.outgoing[None], 0, x, -weight, False)

    def _mean(self, received: Tensor, stride: int, out: Tensor, divisor: int) -> None:
        self._add_up(received, stride, out, divisor, True)

    def _add_up(
        self, messages: Tensor, stride: int, out: Tensor, factor: float, mean: bool
    ) -> None:
        kind = "add", len(messages), stride, mean
        launch = self._launches.get(kind)
        if launch is None:
            step = gcd(self._step, stride)
            launch = self._made(kind, _add_up, len(messages), stride, MEAN=mean, STEP=step)
        if self._programs:
            launch(messages, out, float(factor))

    def _made(self, kind: tuple[Any, ...], kernel: Any, *fixed: Any, **constants: Any) -> Launch:
        launch = self._launches[kind] = Launch(
            kernel, (max(self._programs, 1),), self._table.rows, self._table.count, *fixed,
            ROWS=SIZES["fill"] // 128, **constants, **self._format.constants,
        )  # fmt: skip
        return launch


class CastSum:
    """The messages of a cast that are summed by an all-reduce."""

    def __init__(
        self,
        gradient: torch.dtype,
        dtype: torch.dtype,
        world_size: int,
        shares: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        self._gradient, self._dtype, self._ranks = gradient, dtype, float(world_size)
        self._shares = shares
        self._launches: dict[torch.dtype, Launch] = {}

    def add(self, g: Tensor, e: Tensor, rest: Tensor, message: Tensor) -> None:
        """Write this rank's part of the mean of ``g + e`` to `message`, and the rest to `rest`."""
        if not g.numel():
            return
        launch = self._launches.get(rest.dtype)
        if launch is None:
            launch = self._launches[rest.dtype] = Launch(
                _cast_sum, (triton.cdiv(g.numel(), _BLOCK),), g.numel(), 1.0 / self._ranks,
                -self._ranks, _limit(rest.dtype, self._gradient, self._shares[0]),
                _limit(self._gradient, self._dtype, self._shares[1]), BLOCK=_BLOCK,
            )  # fmt: skip
        launch(g, e, rest, message)


def _limit(source: torch.dtype, dtype: torch.dtype, share: float) -> float:
    """Return the largest magnitude of values of `source` before they are converted to `dtype`."""
    largest = torch.finfo(dtype).max
    return largest * share if largest < torch.finfo(source).max else float("inf")


@kernel("rows", "largest_scale")
def _encode(
    g, e, x, frame, noise, table, rows, largest_scale,
    VALUE: tl.constexpr, LEVELS: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr,
    ADD: tl.constexpr, RANDOM: tl.constexpr, SOURCE: tl.constexpr,
):  # fmt: skip
    """Encode, and write what the message lacks to `x` if ADD."""
    dtype: tl.constexpr = x.dtype.element_ty
    row = segment_of(tl.program_id(0), table, rows, col.FILL_PROGRAM)
    start, k = column(row, col.START), column(row, col.K)
    block = (tl.program_id(0) - column(row, col.FILL_PROGRAM)) * ROWS + tl.arange(0, ROWS)
    # Two values at a time, as int4 codes are sent in pairs.
    even = block[:, None] * 128 + 2 * tl.arange(0, 64)[None, :]
    odd = even + 1
    low_at, high_at = start + even, start + odd
    low = number(tl.load(g + low_at, mask=even < k, other=0.0))
    high = number(tl.load(g + high_at, mask=odd < k, other=0.0))
    if ADD:
        low += number(tl.load(e + low_at, mask=even < k, other=0.0))
        high += number(tl.load(e + high_at, mask=odd < k, other=0.0))
        low, high = number(rounded(low, dtype)), number(rounded(high, dtype))
    drawn_low, drawn_high = low, high
    if RANDOM:
        drawn_low = tl.load(noise + low_at, mask=even < k, other=0.0)
        drawn_high = tl.load(noise + high_at, mask=odd < k, other=0.0)
    sent_low, sent_high = written(
        frame + tl.load(row + col.VALUES), frame + tl.load(row + col.CODES), block, even, k,
        narrowed(low, dtype, SOURCE), narrowed(high, dtype, SOURCE),
        drawn_low, drawn_high, largest_scale, SOURCE, VALUE, LEVELS, RANDOM, ALIGNED,
    )  # fmt: skip
    if ADD:
        # Values are first rounded to the dtype that they are subtracted in, as in plain torch.
        low -= number(rounded(sent_low, dtype))
        high -= number(rounded(sent_high, dtype))
        tl.store(x + low_at, rounded(low, dtype), mask=even < k)
        tl.store(x + high_at, rounded(high, dtype), mask=odd < k)


@kernel("rows", "count", "stride")
def _add_up(
    messages, out, factor, table, rows, count, stride,
    VALUE: tl.constexpr, LEVELS: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr,
    MEAN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Add the messages in order. `factor` is a divisor if MEAN, otherwise a factor on values."""
    dtype: tl.constexpr = out.dtype.element_ty
    row = segment_of(tl.program_id(0), table, rows, col.FILL_PROGRAM)
    start = tl.multiple_of(column(row, col.START), STEP)
    k = tl.multiple_of(column(row, col.K), STEP)
    own = tl.program_id(0) - column(row, col.FILL_PROGRAM)
    i = own * (ROWS * 128) + tl.arange(0, ROWS * 128)
    inside, at = i < k, start + i
    total = tl.zeros((ROWS * 128,), tl.float32)
    if not MEAN:
        total = number(tl.load(out + at, mask=inside, other=0.0))
    raw, step = messages, tl.multiple_of(stride, STEP)
    first = tl.multiple_of(tl.load(row + col.VALUES), STEP)
    second = tl.multiple_of(tl.load(row + col.CODES), STEP)
    for _ in range(0, count):
        value = values_of(raw + first, raw + second, i, inside, LEVELS, VALUE, ALIGNED)
        value = number(rounded(value, dtype))
        if not MEAN:
            value = value * factor
        total = number(rounded(total + value, dtype))
        raw += step
    if MEAN:
        total = tl.div_rn(total, tl.zeros_like(total) + factor)
    tl.store(out + at, rounded(total, dtype), mask=inside)


@kernel()
def _cast_sum(
    g, e, rest, message, n, share, ranks, gradient_limit, message_limit, BLOCK: tl.constexpr
):
    """Send the sum times `share`, and keep what `-ranks` times the message lacks."""
    gradient: tl.constexpr = g.dtype.element_ty
    memory: tl.constexpr = rest.dtype.element_ty
    sent: tl.constexpr = message.dtype.element_ty
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = number(tl.load(g + at, mask=inside, other=0.0))
    total += number(tl.load(e + at, mask=inside, other=0.0))
    total = number(rounded(total, memory))
    # To the gradient's dtype, to the range of the message's, a share of it, and to its dtype.
    value = number(rounded(within(total, gradient_limit), gradient))
    value = number(rounded(within(value, message_limit), gradient))
    value = number(rounded(value * share, gradient))
    value = rounded(clamped(value, gradient, sent), sent)
    tl.store(message + at, value, mask=inside)
    lacking = total + ranks * number(value)
    tl.store(rest + at, rounded(lacking, memory), mask=inside)
