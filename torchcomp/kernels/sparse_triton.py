"""Sparse messages of the segments of a vector in Triton, for CUDA; prepared once.

8 launches select, encode and subtract, and 3 decode and average, for any number of segments and
messages. Shapes are static, and the host never waits. Results equal plain torch bit for bit.
"""

from collections.abc import Sequence
from math import ceil
from typing import Any

import torch
import triton
from torch import Tensor

from torchcomp.kernels import coding_triton as coding
from torchcomp.kernels import decoding_triton as decoding
from torchcomp.kernels.fields_triton import TYPES, Format, aligned
from torchcomp.kernels.launch import Launch
from torchcomp.kernels.quantize import largest_scale
from torchcomp.kernels.segments import Segment
from torchcomp.kernels.selecting_triton import Selecting
from torchcomp.kernels.table_triton import SIZES, Table, covering, offsets_of, tabled

# Offsets are 32-bit, also those of bits in an index code.
LIMIT = 2**30
"""A vector must have fewer elements."""

DTYPES = tuple(TYPES)
"""Supported dtypes of vectors and values."""


class SparseTriton:
    """Sparse messages of the segments of a vector. Workspaces are for one stream at a time.

    A message is 1-D uint8, and begins at a multiple of 4 bytes. `offsets` has the byte of a message
    at which the fields of each segment begin. By default they follow each other from 0 on.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        numel: int,
        fmt: str | None,
        dtype: torch.dtype,
        device: torch.device,
        offsets: Sequence[int] | None = None,
    ) -> None:
        self._format = Format(fmt, dtype)
        offsets = offsets_of(segments, self._format) if offsets is None else offsets
        at = [offset for offset, s in zip(offsets, segments, strict=True) if s.k]
        self._aligned = all(offset % self._format.width == 0 for offset in at)
        self._densest = max((s.k / s.n for s in segments if s.n), default=0.0)
        self._table = tabled(covering(segments, offsets, numel), self._format, device)
        self._selecting = Selecting(self._table)
        place = (self._table.programs["fill"],), self._table.rows, self._table.count
        self._clear = Launch(coding.clear, *place, CHUNK=SIZES["chunk"])
        rows, block = self._table.rows, SIZES["fill"]
        self._code = Launch(coding.code, *place, rows, 0, BLOCK=block, FRAMES=0)
        values = self._table, self._format, self._aligned
        self._fills = {
            (subtract, random): filling(*values, subtract, random)
            for subtract in (False, True)
            for random in (False, True)
        }
        self._subtract = subtraction(*values)
        self._launches: dict[object, list[Launch]] = {}  # of means

    def select(self, x: Tensor) -> Tensor:
        """Return the indices of the entries of largest magnitude of each segment."""
        return self._selecting.select(x, x, x)

    def add_and_select(self, g: Tensor, e: Tensor, out: Tensor) -> Tensor:
        """Write ``g + e`` to `out`, and :meth:`select` from it. All are like `x` there."""
        return self._selecting.select(g, e, out)

    def encode(self, x: Tensor, index: Tensor, frame: Tensor, noise: Tensor | None = None) -> None:
        """Write the message of given entries to `frame`."""
        if self._table.entries:
            self._clear(frame)
            self._code(frame, index)
        self._fill(x, index, frame, noise, False)

    def encode_sum(
        self, g: Tensor, e: Tensor, rest: Tensor, frame: Tensor, noise: Tensor | None = None
    ) -> Tensor:
        """Select from ``g + e``, and write the message to `frame`."""
        index = self._selecting.select(g, e, rest, frame)
        self._fill(rest, index, frame, noise, True)
        return index

    def subtract(self, frame: Tensor, index: Tensor, x: Tensor, weight: float = 1.0) -> None:
        """Subtract `weight` times the finite values of a message from `x`, at the indices."""
        if self._table.entries:
            self._subtract(x, frame, index, float(weight))

    def _fill(
        self, x: Tensor, index: Tensor, frame: Tensor, noise: Tensor | None, subtract: bool
    ) -> None:
        if self._table.entries:
            fill = self._fills[subtract, noise is not None]
            fill(x, frame, index, index if noise is None else noise)

    def mean(self, messages: Tensor, out: Tensor, divisor: float) -> None:
        """Write the sum of all messages, in order, divided by `divisor`, to `out`."""
        bits, tiles = self._table.programs["bit"], self._table.programs["tile"]
        if not tiles:
            return
        count = messages.shape[0]
        stride = messages.stride(0) if count > 1 else 0
        if (messages.data_ptr() | stride) & 3:
            messages = aligned(messages)
            stride = messages.stride(0)
        kind = "mean", count, stride
        launches = self._launches.get(kind) or self._decoding(kind)
        empty, device = torch.empty if bits else torch.zeros, out.device
        work = empty(1 + count * max(bits, 2 * tiles), dtype=torch.int32, device=device)
        index = torch.empty(count * self._table.entries, dtype=torch.int32, device=device)
        if bits:
            launches[0](messages, work, work)
            launches[1](messages, work, index)
        launches[2](messages, work, index, out, float(divisor))

    def _decoding(self, kind: tuple[Any, ...]) -> list[Launch]:
        _, count, stride = kind
        table, bits = self._table, self._table.programs["bit"]
        place = table.rows, table.count
        made = self._launches[kind] = [
            Launch(
                decoding.count_bits, (bits, count), *place, stride, place[0], 0,
                BYTES=SIZES["bit"], FRAMES=0,
            ),
            Launch(
                decoding.decode, (bits, count), *place, table.entries, stride,
                BYTES=SIZES["bit"], CHUNK=SIZES["decode"],
            ),
            adding_up(
                table, self._format, self._aligned, self._densest,
                table.count, table.entries, count, stride, 0,
            ),
        ]  # fmt: skip
        return made


def filling(table: Table, values: Format, aligned: bool, subtract: bool, random: bool) -> Launch:
    """Prepare :func:`.coding_triton.fill`."""
    return Launch(
        coding.fill, (table.programs["fill"],), table.rows, table.count,
        largest_scale(values.levels) if values.levels else 0.0, SUBTRACT=subtract, RANDOM=random,
        SOURCE=TYPES[values.dtype], ROWS=SIZES["fill"] // 128, **_constants(values, aligned),
    )  # fmt: skip


def subtraction(table: Table, values: Format, aligned: bool) -> Launch:
    """Prepare :func:`.decoding_triton.subtract`."""
    return Launch(
        decoding.subtract, (table.programs["fill"],), table.rows, table.count,
        BLOCK=SIZES["fill"], **_constants(values, aligned),
    )  # fmt: skip


def adding_up(table: Table, values: Format, aligned: bool, densest: float, *numbers: int) -> Launch:
    """Prepare :func:`.decoding_triton.add_up`."""
    # Enough for the entries of most tiles.
    most = triton.next_power_of_2(ceil(2 * densest * SIZES["tile"]))
    chunk = min(max(most, 32), 512)
    messages, step = numbers[2], numbers[4]
    return Launch(
        decoding.add_up, (table.programs["tile"],), table.rows, *numbers, COUNTED=step > 0,
        STEP=table.step, LANES=triton.next_power_of_2(max(messages, 2)), TILE=SIZES["tile"],
        CHUNK=chunk, PART=SIZES["part"], warps=2 if chunk < 512 else 4,
        **_constants(values, aligned),
    )  # fmt: skip


def _constants(values: Format, aligned: bool) -> dict[str, Any]:
    """Constants of kernels for the values of messages."""
    return {"VALUE": TYPES[values.value], "LEVELS": values.levels, "ALIGNED": aligned}
