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
from torchcomp.kernels.frames_triton import TYPES, Format
from torchcomp.kernels.launch import Launch
from torchcomp.kernels.quantize import largest_scale
from torchcomp.kernels.selection_triton import Selecting
from torchcomp.kernels.sparse import Sparse
from torchcomp.kernels.table_triton import SIZES, InFrames, Table
from torchcomp.routes.wire import Parts


class SparseTriton(InFrames, Sparse):
    """See :class:`.sparse.Sparse`. Workspaces are for one stream at a time."""

    def _prepare(self, numel: int) -> None:
        super()._prepare(numel)
        table, values = self._table, self._format
        self._selecting = Selecting(table)
        place = (table.programs["fill"],), table.rows, table.count
        self._clear = Launch(coding.clear, *place, CHUNK=SIZES["chunk"])
        self._code = Launch(coding.code, *place, table.rows, 0, BLOCK=SIZES["fill"], FRAMES=0)
        self._fills = {
            (subtract, random): filling(table, values, subtract, random)
            for subtract in (False, True)
            for random in (False, True)
        }
        self._subtract = subtraction(table, values)
        self._means: dict[tuple[int, int], list[Launch]] = {}

    def select(self, x: Tensor) -> Tensor:
        if not self._ready(x):
            return super().select(x)
        x = x.detach()
        return self._selecting.select(x, x, x)

    def add_and_select(self, g: Tensor, e: Tensor, out: Tensor) -> Tensor:
        if not self._ready(g, e, out):
            return super().add_and_select(g, e, out)
        return self._selecting.select(g.detach(), e.detach(), out.detach())

    def encode(self, x: Tensor, index: Tensor, noise: Tensor | None) -> Sequence[Parts]:
        frame = self._frame(x)
        if frame is None:
            return super().encode(x, index, noise)
        if self._table.entries:
            self._clear(frame)
            self._code(frame, index)
        self._fill(x, index, frame, noise, False)
        return self._placed  # type: ignore[no-any-return]

    def encode_sum(
        self, g: Tensor, e: Tensor, rest: Tensor, noise: Tensor | None
    ) -> tuple[Sequence[Parts], Tensor]:
        frame = self._frame(g, e, rest)
        if frame is None:
            return super().encode_sum(g, e, rest, noise)
        index = self._selecting.select(g, e, rest, frame)
        self._fill(rest, index, frame, noise, True)
        return self._placed, index

    def subtract(
        self, index: Tensor, parts: Sequence[Parts], x: Tensor, weight: float = 1.0
    ) -> None:
        frames = self.vectors.frames
        if frames is None or parts is not self._placed:
            super().subtract(index, parts, x, weight)
        elif not self._ready(x):
            # What is placed can be the bytes of a field that is not aligned.
            super().subtract(index, frames.unpack(frames.outgoing)[0], x, weight)
        elif self._table.entries:
            self._subtract(x, frames.outgoing, index, float(weight))

    def _fill(
        self, x: Tensor, index: Tensor, frame: Tensor, noise: Tensor | None, subtract: bool
    ) -> None:
        if self._table.entries:
            fill = self._fills[subtract, noise is not None]
            fill(x, frame, index, index if noise is None else noise)

    def _mean(self, received: Tensor, stride: int, out: Tensor, divisor: int) -> None:
        bits, tiles = self._table.programs["bit"], self._table.programs["tile"]
        if not tiles:
            return
        count, entries, device = len(received), self._table.entries, out.device
        launches = self._means.get((count, stride)) or self._decoding(count, stride)
        size, empty = 1 + count * max(bits, 2 * tiles), torch.empty if bits else torch.zeros
        work = empty(size, dtype=torch.int32, device=device)
        index = torch.empty(count * entries, dtype=torch.int32, device=device)
        if bits:
            launches[0](received, work, work)
            launches[1](received, work, index)
        launches[2](received, work, index, out, float(divisor))

    def _decoding(self, count: int, stride: int) -> list[Launch]:
        table, place = self._table, (self._table.rows, self._table.count)
        grid, numbers = (table.programs["bit"], count), (table.entries, count, stride)
        densest = max((s.k / s.n for s in self.segments if s.n), default=0.0)
        made = self._means[count, stride] = [
            Launch(
                coding.count_bits, grid, *place, stride, table.rows, 0,
                BYTES=SIZES["bit"], FRAMES=0,
            ),
            Launch(
                coding.decode, grid, *place, table.entries, stride,
                BYTES=SIZES["bit"], CHUNK=SIZES["decode"],
            ),
            adding_up(table, self._format, densest, table.count, *numbers, 0),
        ]  # fmt: skip
        return made


def filling(table: Table, values: Format, subtract: bool, random: bool) -> Launch:
    """Prepare :func:`.coding_triton.fill`."""
    return Launch(
        coding.fill, (table.programs["fill"],), table.rows, table.count,
        largest_scale(values.levels) if values.levels else 0.0, SUBTRACT=subtract, RANDOM=random,
        SOURCE=TYPES[values.dtype], ROWS=SIZES["fill"] // 128, **values.constants,
    )  # fmt: skip


def subtraction(table: Table, values: Format) -> Launch:
    """Prepare :func:`.coding_triton.subtract`."""
    return Launch(
        coding.subtract, (table.programs["fill"],), table.rows, table.count,
        BLOCK=SIZES["fill"], **values.constants,
    )  # fmt: skip


def adding_up(table: Table, values: Format, densest: float, *numbers: int) -> Launch:
    """Prepare :func:`.coding_triton.add_up`."""
    # Enough for the entries of most tiles.
    most = triton.next_power_of_2(ceil(2 * densest * SIZES["tile"]))
    chunk = min(max(most, 32), 512)
    messages, step = numbers[2], numbers[4]
    options: dict[str, Any] = {"warps": 2 if chunk < 512 else 4, **values.constants}
    return Launch(
        coding.add_up, (table.programs["tile"],), table.rows, *numbers, COUNTED=step > 0,
        STEP=table.step, LANES=triton.next_power_of_2(max(messages, 2)), TILE=SIZES["tile"],
        CHUNK=chunk, PART=SIZES["part"], **options,
    )  # fmt: skip
