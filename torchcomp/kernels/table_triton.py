"""The table of a vector's segments, in memory of the device: what kernels need to know of each."""

from collections.abc import Mapping, Sequence
from math import ceil, sqrt

import triton
import triton.language as tl

from torchcomp.kernels.elias_fano import low_bits, nbytes
from torchcomp.kernels.fields_triton import Format
from torchcomp.kernels.segments import Segment
from torchcomp.kernels.triton_jit import kernel

# The columns of the table: a row for each segment, in ascending order. For some kernels a column
# has the number of the segment's first program.
WIDTH = tl.constexpr(26)
BLOCK_PROGRAM = tl.constexpr(0)
SEGMENT = tl.constexpr(1)
START = tl.constexpr(2)
N = tl.constexpr(3)
K = tl.constexpr(4)
CANDIDATE = tl.constexpr(5)  # where its candidates begin
CAPACITY = tl.constexpr(6)  # how many of them fit
FIRST = tl.constexpr(7)  # number of entries of the segments before
BLOCKS = tl.constexpr(8)
RANK = tl.constexpr(9)  # in the sample
COUNT_PROGRAM = tl.constexpr(10)
COUNT_PROGRAMS = tl.constexpr(11)
GROUP = tl.constexpr(12)  # its first group of blocks
FILL_PROGRAM = tl.constexpr(13)
VALUES = tl.constexpr(14)  # byte of a frame at which its first field begins
CODES = tl.constexpr(15)  # likewise for its second field
CODE = tl.constexpr(16)  # and for its index code, the low part of which comes first
HIGH = tl.constexpr(17)  # and for the high part
END = tl.constexpr(18)  # and for the end of the code
LOW_BITS = tl.constexpr(19)
CODED = tl.constexpr(20)  # whether its index code has any bytes
SHARE = tl.constexpr(21)  # bytes of the code for each block
BIT_PROGRAM = tl.constexpr(22)
BIT_PROGRAMS = tl.constexpr(23)
TILE_PROGRAM = tl.constexpr(24)
FILL_PROGRAMS = tl.constexpr(25)


@kernel()
def column(row: tl.tensor, which: tl.constexpr) -> tl.tensor:
    """Return a number of a segment that has 32 bits."""
    return tl.load(row + which).to(tl.int32)


@kernel("rows")
def row_of(program: tl.tensor, table: tl.tensor, rows: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Return a pointer to the row of the segment that a program works on, by binary search.

    The first column of a table has each segment's first program.
    """
    below, above = 0, rows
    while above - below > 1:
        middle = (below + above) // 2
        later = tl.load(table + middle * WIDTH) > program
        above = tl.where(later, middle, above)
        below = tl.where(later, below, middle)
    return table + below * WIDTH


@kernel("rows")
def segment_of(
    program: tl.tensor, table: tl.tensor, rows: tl.tensor, first: tl.constexpr
) -> tl.tensor:
    """Return the row of the segment of a program; `first` is the column of the first programs."""
    return row_of(program, table + first, rows, WIDTH) - first


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


def placed(
    covered: Sequence[tuple[Segment, int]], values: Format, sizes: Mapping[str, int]
) -> tuple[list[tuple[int, ...]], dict[str, int]]:
    """Return the rows of the table, and how many programs or groups there are of each kind.

    Args:
        covered: the segments, with the bytes of a message at which their fields begin.
        values: the format of their values.
        sizes: what a program of each kind handles, the blocks of a group, and the sample.
    """
    rows: list[tuple[int, ...]] = []
    at = dict.fromkeys(("block", "count", "group", "fill", "bit", "tile"), 0)
    candidate = first = 0
    for (start, n, k), offset in covered:
        capacity = min(n, 4 * k + sizes["block"]) if k else 0
        expected = min(n, sizes["sample"]) * k / n
        coded = 0 < k < n
        low = low_bits(n, k) if coded else 0
        code = offset + values.nbytes(k)
        high, end = code + (k * low + 7) // 8, code + nbytes(n, k)
        blocks = triton.cdiv(n, sizes["block"])
        own = {
            "block": blocks,
            "count": triton.cdiv(capacity, sizes["count"]),
            "group": triton.cdiv(blocks, sizes["group"]),
            "fill": triton.cdiv(k, sizes["fill"]),
            "bit": triton.cdiv(end - high if coded else triton.cdiv(k, 8), sizes["bit"]),
            "tile": triton.cdiv(n, sizes["tile"]),
        }
        rows.append(
            (
                at["block"], len(rows), start, n, k, candidate, capacity, first, blocks,
                # With four standard deviations more, the bound is hardly ever too high.
                ceil(expected + 4 * sqrt(expected) + 8),
                at["count"], own["count"], at["group"],
                at["fill"], offset, offset + values.second(k), code, high, end, low, int(coded),
                triton.cdiv(end - code, blocks), at["bit"], own["bit"], at["tile"], own["fill"],
            )
        )  # fmt: skip
        candidate, first = candidate + capacity, first + k
        at = {kind: at[kind] + own[kind] for kind in at}
    return rows, at
