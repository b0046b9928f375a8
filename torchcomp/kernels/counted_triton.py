"""Sparse messages whose numbers of entries only the device knows, in Triton, for CUDA.

`lay_out` computes from the counts what :mod:`.sparse_triton` prepares once. The same kernels then
write and read the messages. The host waits for the lengths of the frames, for the collective.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchcomp.engine import host
from torchcomp.kernels import coding_triton as coding
from torchcomp.kernels import table_triton as col
from torchcomp.kernels.frames_triton import DTYPES, LIMIT, Format
from torchcomp.kernels.launch import Launch
from torchcomp.kernels.segments import Segment
from torchcomp.kernels.selection_triton import Search
from torchcomp.kernels.sparse_triton import adding_up, filling, subtraction
from torchcomp.kernels.table_triton import SIZES, Table, step_of
from torchcomp.kernels.triton_jit import kernel
from torchcomp.routes.wire import HEADER, MARK, Frames

HEADER_BYTES = tl.constexpr(HEADER)

__all__ = ["DTYPES", "LIMIT", "Counted", "Search"]


class _Received(Frames):
    """Frames that are checked when they are decoded."""

    def __init__(self, count: int, device: torch.device) -> None:
        super().__init__((), device)
        self.sizes, self.nbytes, self.on_host = (1,) * count, HEADER * count, False
        self.expected = torch.zeros(count, 2, dtype=torch.int64, device=device)
        self.differences = self.expected

    def headers(self, received: Tensor) -> Tensor:
        """Return the bits of the headers that are not as expected."""
        return self.differences


class Counted:
    """Messages in frames: those that this rank sends, and those that it receives."""

    search = Search

    def __init__(
        self,
        fmt: str | None,
        sends: Sequence[Sequence[Segment]],
        reads: Sequence[Sequence[Segment]],
        signatures: Sequence[int],
        messages: int,
        densest: float,
        dtype: torch.dtype,
        exchange: Any,
        device: torch.device,
        spaced: bool,
    ) -> None:
        self._device, self._exchange, self._messages = device, exchange, messages
        self._sides = len(sends), len(reads)
        self._frames = _Received(len(reads), device)
        sent, read = ([piece for own in side for piece in own] for side in (sends, reads))
        rows, step = (len(sent), len(read)), len(read) // messages
        tiles = [triton.cdiv(piece.n, SIZES["tile"]) for piece in read[:step]]
        firsts = [0, *accumulate(piece.k for piece in sent)] if spaced else [-1] * len(sent)
        firsts = firsts[: len(sent)] + [-1] * len(read)
        tile = [0] * len(sent) + [0, *accumulate(tiles)][:step] * messages
        pieces: list[tuple[int, ...]] = []
        frames: list[tuple[int, ...]] = []
        for side in (sends, reads):
            count = 0
            for frame, own in enumerate(side):
                frames.append((count, count + len(own), signatures[len(frames)]))
                count += len(own)
                for i, (start, n, _) in enumerate(own):
                    numbers = start, n, firsts[len(pieces)], tile[len(pieces)]
                    pieces.append((*numbers, frame, 2 * i + 1))
        placed, framed = (
            host.copy_to(torch.tensor(each, dtype=torch.int64), device) for each in (pieces, frames)
        )
        whole, ends = self._memory([col.WIDTH.value * sum(rows), 2 * sum(rows)])
        headers, origins = self._memory([3 * len(frames), len(frames)])
        values, power = Format(fmt, dtype), triton.next_power_of_2
        lanes = power(max(*self._sides, 2))
        self._lay_out = Launch(
            lay_out, (2,), placed, framed, whole, ends, headers, origins, *rows, *self._sides,
            LEVELS=values.levels, SIZE=values.value.itemsize, ROWS=power(max(*rows, 2)),
            FRAMES=lanes, FILL=SIZES["fill"], BYTES=SIZES["bit"], WORD=MARK,
            warps=8,
        )  # fmt: skip
        # Only the first fields of frames are at multiples of 8 bytes.
        values.aligned = all(len(own) <= 1 for own in (*sends, *reads))
        # Grids are those of the step.
        programs, self._tiles = {"fill": 1, "tile": max(sum(tiles), 1)}, sum(tiles)
        out = Table(whole, rows[0], programs, step_of(sent))
        back = Table(whole[col.WIDTH.value * rows[0] :], rows[1], programs, step_of(read))
        self._code = Launch(
            coding.code, (1,), out.rows, out.count, headers, len(sends),
            BLOCK=SIZES["fill"], FRAMES=lanes,
        )  # fmt: skip
        self._fill = [filling(out, values, subtract, False) for subtract in (False, True)]
        self._subtract = subtraction(out, values)
        self._count_bits = Launch(
            coding.count_bits, (1, 1), back.rows, back.count, 0, headers[3 * len(sends) :],
            len(reads), BYTES=SIZES["bit"], FRAMES=lanes,
        )  # fmt: skip
        self._decode = Launch(
            coding.decode, (1, 1), back.rows, back.count, 0, 0,
            BYTES=SIZES["bit"], CHUNK=SIZES["decode"],
        )  # fmt: skip
        self._add_up = adding_up(back, values, densest, step, 0, messages, 0, step)

    def _memory(self, lengths: Sequence[int]) -> Sequence[Tensor]:
        memory = torch.empty(sum(lengths), dtype=torch.int64, device=self._device)
        return torch.split(memory, list(lengths))

    def begin(self, mine: Tensor, theirs: Tensor) -> None:
        """Lay out the messages of this step. The host waits for their lengths."""
        sent, read = self._sides
        numbers = torch.empty(sent + read + 3, dtype=torch.int64, device=self._device)
        self._lay_out(mine, theirs, numbers)
        *sizes, self._fills, self._bits, self._entries = numbers.tolist()
        self.sizes, self.arriving = sizes[:sent], sizes[sent:]

    def write(self, x: Tensor, index: Tensor, key: object, subtract: bool) -> None:
        """Write the frames with the entries of `x`, contiguous and of one of DTYPES."""
        self._index, nbytes = index, sum(self.sizes)
        self.outgoing = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        if nbytes:
            self._code(self.outgoing, index, programs=self._fills)
            self._fill[subtract](x, self.outgoing, index, index, programs=self._fills)

    def subtract(self, x: Tensor, key: object, weight: float) -> None:
        """Subtract `weight` times the message that was written from `x`, where it is finite."""
        if self.outgoing.numel():
            self._subtract(x, self.outgoing, self._index, float(weight), programs=self._fills)

    def mean(self, received: Tensor, out: Tensor, key: object, divisor: int) -> None:
        """Check received frames, aligned to 8 bytes, and write the mean of their messages.

        If an index code is damaged, all of `out` becomes NaN.
        """
        frames, tiles, bits = self._frames, self._tiles, self._bits
        size = 1 + max(bits, 2 * self._messages * tiles)
        work = torch.empty(size, dtype=torch.int32, device=self._device)
        index = torch.empty(self._entries, dtype=torch.int32, device=self._device)
        frames.differences = torch.empty_like(frames.expected)
        self._count_bits(received, work, frames.differences, programs=bits)
        self._exchange.check(frames, received.view(1, -1), range(self._exchange.world_size))
        self._decode(received, work, index, programs=bits)
        if tiles:
            self._add_up(received, work, index, out, float(divisor))


@kernel("rows_sent", "rows_read", "sent", "read")
def lay_out(
    mine, theirs, numbers, pieces, frames, table, ends, headers, origins, rows_sent, rows_read,
    sent, read,
    LEVELS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, FRAMES: tl.constexpr,
    FILL: tl.constexpr, BYTES: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """Lay out the frames to send (program 0), and the frames to receive (program 1)."""
    side = tl.program_id(0)
    rows, count = tl.where(side > 0, rows_read, rows_sent), tl.where(side > 0, read, sent)
    i = tl.arange(0, ROWS)
    inside = i < rows
    piece = pieces + 6 * (side * rows_sent + i)
    told = tl.load(mine + i, mask=inside & (side == 0), other=0).to(tl.int64)
    told += tl.load(theirs + i, mask=inside & (side > 0), other=0).to(tl.int64)
    n = tl.load(piece + 1, mask=inside, other=0)
    # Counts that were damaged on the way must not lead outside. The signature tells.
    k = tl.minimum(tl.maximum(told, 0), n)
    second, values = value_bytes(k, LEVELS, SIZE)
    coded = (k > 0) & (k < n)
    low, code_bytes = code_size(n, k)
    low, code_bytes = tl.where(coded, low, 0), tl.where(coded, code_bytes, 0)
    end = tl.cumsum(values + code_bytes, 0)
    ends += 2 * side * rows_sent
    tl.store(ends + 2 * i, end, mask=inside)
    factor = tl.load(piece + 5, mask=inside, other=0)
    tl.store(ends + 2 * i + 1, tl.cumsum(told * factor, 0), mask=inside)
    # Other threads of this program read what this one has written, here and below.
    tl.debug_barrier()

    numbers += side * sent
    frames, headers = frames + 3 * side * sent, headers + 3 * side * sent
    origins += side * sent
    lay_out_frames(ends, numbers, frames, headers, origins, count, FRAMES, WORD)
    tl.debug_barrier()

    of_frame = tl.load(piece + 4, mask=inside, other=0)
    at = tl.load(origins + of_frame, mask=inside, other=0)
    at += end - values - code_bytes
    high, code = at + values + (k * low + 7) // 8, at + values
    bits = tl.where(coded, code + code_bytes - high, (k + 7) // 8)
    fills, bits = (k + FILL - 1) // FILL, (bits + BYTES - 1) // BYTES
    given = tl.load(piece + 2, mask=inside, other=0)
    row = table + col.WIDTH * (side * rows_sent + i)
    tl.store(row + col.START, tl.load(piece, mask=inside, other=0), mask=inside)
    tl.store(row + col.N, n, mask=inside)
    tl.store(row + col.K, k, mask=inside)
    tl.store(row + col.FIRST, tl.where(given < 0, tl.cumsum(k, 0) - k, given), mask=inside)
    tl.store(row + col.FILL_PROGRAM, tl.cumsum(fills, 0) - fills, mask=inside)
    tl.store(row + col.VALUES, at, mask=inside)
    tl.store(row + col.CODES, at + second, mask=inside)
    tl.store(row + col.CODE, code, mask=inside)
    tl.store(row + col.HIGH, high, mask=inside)
    tl.store(row + col.END, code + code_bytes, mask=inside)
    tl.store(row + col.LOW_BITS, low, mask=inside)
    tl.store(row + col.CODED, coded.to(tl.int64), mask=inside)
    tl.store(row + col.BIT_PROGRAM, tl.cumsum(bits, 0) - bits, mask=inside)
    tl.store(row + col.BIT_PROGRAMS, bits, mask=inside)
    tl.store(row + col.TILE_PROGRAM, tl.load(piece + 3, mask=inside, other=0), mask=inside)
    if side == 0:
        tl.store(numbers + sent + read, tl.maximum(tl.sum(fills, 0), 1))
    else:
        tl.store(numbers + read + 1, tl.maximum(tl.sum(bits, 0), 1))
        tl.store(numbers + read + 2, tl.sum(k, 0))


@kernel()
def lay_out_frames(
    ends, numbers, frames, headers, origins, count, FRAMES: tl.constexpr, WORD: tl.constexpr
):
    """Lay out `count` frames. `ends` has the sums of bytes, and of signatures, up to each piece."""
    f = tl.arange(0, FRAMES)
    live = f < count
    frame = frames + 3 * f
    first, stop = tl.load(frame, mask=live, other=0), tl.load(frame + 1, mask=live, other=0)
    before = tl.load(ends + 2 * first - 2, mask=live & (first > 0), other=0)
    signed = tl.load(frame + 2, mask=live, other=0)
    signed -= tl.load(ends + 2 * first - 1, mask=live & (first > 0), other=0)
    signed += tl.load(ends + 2 * stop - 1, mask=live & (stop > 0), other=0)
    length = tl.load(ends + 2 * stop - 2, mask=live & (stop > 0), other=0) - before
    size = tl.where(length > 0, HEADER_BYTES + (length + 7) // 8 * 8, 0)
    begin = tl.cumsum(size, 0) - size
    header = headers + 3 * f
    tl.store(header, tl.where(length > 0, begin, -1), mask=live)
    tl.store(header + 1, WORD | (length << 16), mask=live)
    tl.store(header + 2, signed, mask=live)
    tl.store(origins + f, begin + HEADER_BYTES - before, mask=live)
    tl.store(numbers + f, size, mask=live)


@kernel()
def value_bytes(k, LEVELS: tl.constexpr, SIZE: tl.constexpr):
    """Return the bytes of the first field of `k` values, and of all their fields."""
    if LEVELS == 0:
        return k * SIZE, k * SIZE
    else:
        scales = (k + 127) // 128 * 4
        return scales, scales + (k if LEVELS == 127 else (k + 1) // 2)


@kernel()
def code_size(n, k):
    """Return the width of low parts and the bytes of an index code; see :mod:`.elias_fano`."""
    low, fewest = tl.zeros_like(n), (n + 7) // 8
    # The smallest of several best widths, as the format requires.
    for width in range(1, 32):
        nbytes = (k * width + 7) // 8 + (k + ((n - 1) >> width) + 7) // 8
        better = nbytes < fewest
        low, fewest = tl.where(better, width, low), tl.where(better, nbytes, fewest)
    return low, fewest
