"""The table of a vector's segments, in memory of the device: what kernels need to know of each."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchcomp.engine import host
from torchcomp.kernels.elias_fano import low_bits, nbytes
from torchcomp.kernels.frames_triton import DTYPES, LIMIT, Format
from torchcomp.kernels.segments import Prepared, Segment
from torchcomp.kernels.triton_jit import kernel

SIZES = {
    "block": 4096,  # elements of the vector per program that collects candidates
    "count": 2048,  # candidates per program that counts digits
    # Numbers that a program reads at once, of a list whose length only the device knows.
    "chunk": 256,
    # Blocks whose counts are also added up. With b blocks, a program reads b / 64 + 64 counts.
    "group": 64,
    "fill": 512,  # values per program that encodes them, in blocks of 128
    "bit": 256,  # bytes of the high part of an index code per program that decodes them
    # Entries that a program decodes at once. Not fewer than its threads: each reads what it writes.
    "decode": 512,
    "tile": 4096,  # elements of the vector that a program adds to: 16 KiB of float32
    "part": 512,  # elements that a program zeroes or divides at once
}

# The columns of the table, which has a row for each segment, in ascending order. PROGRAM is the
# number of its first program of a kernel, and PROGRAMS how many it has. CANDIDATE is where its
# candidates begin, CAPACITY how many fit, FIRST the number of entries before, and GROUP its first
# group of blocks. In bytes of a frame: where the fields VALUES and CODES, the index CODE and the
# HIGH part of that begin, and its END. CODED is whether it has any, SHARE how many for each block.
(
    BLOCK_PROGRAM, SEGMENT, START, N, K, CANDIDATE, CAPACITY, FIRST, BLOCKS, COUNT_PROGRAM,
    COUNT_PROGRAMS, GROUP, FILL_PROGRAM, VALUES, CODES, CODE, HIGH, END, LOW_BITS, CODED, SHARE,
    BIT_PROGRAM, BIT_PROGRAMS, TILE_PROGRAM, FILL_PROGRAMS,
) = map(tl.constexpr, range(25))  # fmt: skip
WIDTH = tl.constexpr(25)


@kernel()
def column(row, which: tl.constexpr):
    """Return a number of a segment that has 32 bits."""
    return tl.load(row + which).to(tl.int32)


@kernel("rows")
def segment_of(program, table, rows, first: tl.constexpr):
    """Return the row of the segment of a program; `first` is the column of the first programs."""
    below, above = 0, rows
    while above - below > 1:
        middle = (below + above) // 2
        later = tl.load(table + middle * WIDTH + first) > program
        above = tl.where(later, middle, above)
        below = tl.where(later, below, middle)
    return table + below * WIDTH


def offsets_of(segments: Sequence[Segment], values: Format) -> list[int]:
    """Return where the fields of each segment begin in a message without anything else."""
    sizes = (values.nbytes(k) + nbytes(n, k) for _, n, k in segments)
    return [0, *accumulate(sizes)][:-1]


def covering(
    segments: Sequence[Segment], offsets: Sequence[int], numel: int
) -> list[tuple[Segment, int]]:
    """Return the segments with their offsets, and segments without entries between them."""
    covered, end = [], 0
    for segment, offset in [*zip(segments, offsets, strict=True), (Segment(numel, 0, 0), 0)]:
        if segment.start > end:
            covered.append((Segment(end, segment.start - end, 0), 0))
        if segment.n:
            covered.append((segment, offset))
        end = segment.start + segment.n
    return covered


@dataclass(frozen=True)
class Table:
    """The table of a vector's segments on a device."""

    rows: Tensor
    count: int
    programs: Mapping[str, int]
    step: int
    capacity: int = 0
    entries: int = 0


def step_of(segments: Iterable[Segment]) -> int:
    """Return what all starts and lengths are multiples of, at most 16."""
    return 16 if all(s.start % 16 == s.n % 16 == 0 for s in segments) else 1


def tabled(
    covered: Sequence[tuple[Segment, int]],
    values: Format,
    device: torch.device,
    wholes: Sequence[int] = (),
) -> Table:
    """Make the table of segments. Only the stream that is current now may use it."""
    rows: list[tuple[int, ...]] = []
    at = dict.fromkeys(("block", "count", "group", "fill", "bit", "tile"), 0)
    candidate = first = 0
    for i, ((start, n, k), offset) in enumerate(covered):
        whole, fewest = (wholes[i], 1) if wholes else (n, 0)
        kept = k * n / max(whole, 1)
        capacity = min(n, ceil(4 * kept) + SIZES["block"]) if k else 0
        coded = 0 < k < n
        low = low_bits(n, k) if coded else 0
        code = offset + values.nbytes(k)
        high, end = code + (k * low + 7) // 8, code + (nbytes(n, k) if coded else 0)
        blocks = max(triton.cdiv(n, SIZES["block"]), fewest)
        own = {
            "block": blocks,
            "count": max(triton.cdiv(capacity, SIZES["count"]), fewest),
            "group": triton.cdiv(blocks, SIZES["group"]),
            "fill": triton.cdiv(k, SIZES["fill"]),
            "bit": triton.cdiv(end - high if coded else triton.cdiv(k, 8), SIZES["bit"]),
            "tile": triton.cdiv(n, SIZES["tile"]),
        }
        rows.append(
            (
                at["block"], len(rows), start, n, k, candidate, capacity, first, blocks,
                at["count"], own["count"], at["group"],
                at["fill"], offset, offset + values.second(k), code, high, end, low, int(coded),
                triton.cdiv(end - code, blocks), at["bit"], own["bit"], at["tile"], own["fill"],
            )
        )  # fmt: skip
        candidate, first = candidate + capacity, first + min(n, k)
        at = {kind: at[kind] + own[kind] for kind in at}
    return Table(
        host.copy_to(torch.tensor(rows, dtype=torch.int64), device),
        len(rows),
        at,
        step_of([segment for segment, _ in covered]),
        candidate,
        first,
    )


class InFrames:
    """Kernels that write the frames to send, and read frames as they were received."""

    reads_frames = True
    vectors: Prepared
    fmt: Any
    accumulate: Any
    _prepared = False

    def mean_of(self, received: Tensor, out: Tensor, divisor: int) -> None:
        """Write the sum of received messages, in order, divided by `divisor`, to `out`."""
        if self._ready(out):
            self._mean(received, received.stride(0) if len(received) > 1 else 0, out, divisor)
        else:
            frames: Any = self.vectors.frames
            self.accumulate(frames.unpack(received), out.zero_())
            out.div_(divisor)

    def _ready(self, *tensors: Tensor) -> bool:
        """Prepare the kernels, and return whether they support these tensors."""
        for x in tensors:
            if x.dtype not in DTYPES or not x.is_contiguous() or x.numel() >= LIMIT:
                return False
        if not self._prepared:
            if self.vectors.dtype not in DTYPES:
                return False
            self._prepare(tensors[0].numel())
            self._prepared = True
        return True

    def _frame(self, *tensors: Tensor) -> Tensor | None:
        """Return the memory of the frames if kernels can write the message of these tensors."""
        frames = self.vectors.frames
        return frames.outgoing if frames is not None and self._ready(*tensors) else None

    @property
    def _placed(self) -> Any:
        """What is returned for a message that kernels have written."""
        return None if self.vectors.frames is None else self.vectors.frames.placed

    def _prepare(self, numel: int) -> None:
        """Prepare what is the same in every step, for a bucket of `numel` elements."""
        vectors, segments, frames = self.vectors, self.vectors.segments, self.vectors.frames
        self._format = values = Format(self.fmt, vectors.dtype)
        self._offsets = offsets_of(segments, values) if frames is None else frames.offsets
        placed = zip(self._offsets, segments, strict=True)
        values.aligned = all(offset % values.width == 0 for offset, s in placed if s.k)
        self._table = tabled(covering(segments, self._offsets, numel), values, vectors.device)

    @abstractmethod
    def _mean(self, received: Tensor, stride: int, out: Tensor, divisor: int) -> None:
        """Do as :meth:`mean_of`, with kernels. `stride` is the distance of messages in bytes."""
