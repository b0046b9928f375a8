"""Elias-Fano coding in Triton, for CUDA. Results equal those of plain torch bit for bit.

One call codes all segments, of one message or of several. See :mod:`.elias_fano` for the code.

Encoding sets the bits of each entry with atomic operations on 32-bit words, in one launch. Bytes
per entry: 8 read, and about 3 words of 4 that are read and written, in the L2 cache.

Decoding takes two passes over the high part:

1. Every program counts the set bits of its block of the high part.
2. The running sum of the counts gives the rank of each set bit. Every program computes the indices
   of its bits, stores them, and checks them.

Entries with equal high parts have adjacent bits, and all others are in order by their high parts.
Each entry is therefore compared with the one before it only if their bits are adjacent. Bytes per
entry, for 1 %: 0.65 of the code are read twice, 0.75 once, and an index is written.

Each launch needs a table of the segments, one row each, copied from the host without a wait.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchcomp.kernels.elias_fano import low_bits, nbytes
from torchcomp.kernels.segments_triton import Rows, Segment, row_of, table
from torchcomp.kernels.triton_jit import EXACT, kernel, on_device_of

_ENTRIES = 512
"""Entries that a program encodes."""

_BITS = 1024
"""Bits of the high part that a program decodes; a multiple of 8."""

_SHORT = 2**28
"""Up to this n, 32 bits are enough: with 2^l <= 2 n, what _decode computes is at most 5 n."""


def encode(
    index: Tensor, segments: Sequence[Segment], out_offsets: Sequence[int], out: Tensor
) -> None:
    """Write the code of each segment to `out`.

    Args:
        index: 1-D int64 or int32, contiguous: the indices of all segments, one after another. Those
            of a segment (start, n, k) are k, strictly ascending within [start, start + n).
        segments: the segments, as host integers.
        out_offsets: for each segment, the byte of `out` at which its code of ``nbytes(n, k)`` bytes
            begins.
        out: 1-D uint8, contiguous, on the device of `index`. The bytes of the codes must be zero.
    """
    with on_device_of(index):
        # Words begin at multiples of 4 bytes, which `out` can lie between.
        shift = out.data_ptr() % 4
        rows, programs = table(_encoded, index.device, segments, out_offsets, (shift, _ENTRIES))
        if programs:
            _encode[(programs,)](index, rows, rows.shape[0], out, shift, ENTRIES=_ENTRIES, **EXACT)


def decode(
    raw: Tensor, segments: Sequence[Segment], in_offsets: Sequence[int], index: Tensor
) -> Tensor:
    """Decode the indices of all segments, and test whether a code is damaged.

    Args:
        raw: 1-D uint8, contiguous, of any contents.
        segments: the segments (start, n, k), as host integers.
        in_offsets: for each segment, the byte of `raw` at which its code begins.
        index: 1-D int64 or int32, contiguous, to write the indices to: one segment after another,
            in each strictly ascending within [start, start + n).

    Returns:
        A scalar bool tensor, whether a code is damaged. If so, the indices are any within their
        segment's bounds.
    """
    with on_device_of(raw):
        rows, programs = table(_decoded, raw.device, segments, in_offsets, (_BITS,))
        damaged = torch.empty(1, dtype=torch.uint8, device=raw.device)
        if not programs:
            return damaged.zero_().view(torch.bool)[0]
        counts = torch.empty(programs, dtype=torch.int32, device=raw.device)
        count = rows.shape[0]
        _count[(programs,)](raw, rows, count, counts, damaged, BITS=_BITS, **EXACT)
        ends = counts.cumsum(0)
        longest = max(n for _, n, _ in segments)
        local = tl.int32 if longest <= _SHORT else tl.int64
        _decode[(programs,)](
            raw, rows, count, ends, index, damaged, LOCAL=local, BITS=_BITS, **EXACT
        )
    return damaged.view(torch.bool)[0]


# --- Tables ---------------------------------------------------------------------------------------


def _encoded(
    segments: Sequence[Segment], offsets: Sequence[int], sizes: tuple[int, int]
) -> tuple[Rows, int]:
    """Return the rows for encoding, and the number of programs."""
    shift, entries = sizes
    rows, program, first = [], 0, 0
    for (start, n, k), offset in zip(segments, offsets, strict=True):
        if k not in (0, n):
            low = low_bits(n, k)
            bit = 8 * (offset + shift)
            rows.append((program, first, start, k, low, bit, bit + (k * low + 7) // 8 * 8))
            program += triton.cdiv(k, entries)
        first += k
    return tuple(rows), program


def _decoded(
    segments: Sequence[Segment], offsets: Sequence[int], sizes: tuple[int]
) -> tuple[Rows, int]:
    """Return the rows for decoding, and the number of programs."""
    rows, program, first = [], 0, 0
    for (start, n, k), offset in zip(segments, offsets, strict=True):
        # If all are kept, the code has no bits. _decode fills up what has none: 0, 1, 2, ...
        low, ones = (0, 0) if k == n else (low_bits(n, k), k)
        cut = (k * low + 7) // 8
        high = nbytes(n, k) - cut
        if k:
            rows.append((program, first, start, n, k, ones, low, offset, offset + cut, high))
            program += max(1, triton.cdiv(8 * high, sizes[0]))
        first += k
    return tuple(rows), program


# --- Kernels --------------------------------------------------------------------------------------


@kernel("rows", "shift")
def _encode(
    index: tl.tensor,
    table: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    shift: tl.tensor,
    ENTRIES: tl.constexpr,
) -> None:
    row = row_of(tl.program_id(0), table, rows, 7)
    program, first, start, k = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    low, low_part, high_part = tl.load(row + 4), tl.load(row + 5), tl.load(row + 6)
    i = (tl.program_id(0) - program) * ENTRIES + tl.arange(0, ENTRIES)
    inside = i < k
    local = tl.load(index + first + i, mask=inside, other=0).to(tl.int64) - start
    words = (out - shift).to(tl.pointer_type(tl.int32))
    # If there is no low part, the high part is a bitmap of the indices.
    bit = high_part + (local >> low) + tl.where(low > 0, i, 0)
    one = tl.full((ENTRIES,), 1, tl.int64) << (bit & 31)
    tl.atomic_or(words + (bit >> 5), one.to(tl.int32), mask=inside, sem="relaxed")
    part = local & ((tl.full((ENTRIES,), 1, tl.int64) << low) - 1)
    bit = low_part + i * low
    offset = bit & 31
    for word in range(0, ((low + 62) // 32).to(tl.int32)):
        # The bits of the low part that fall into this word: what the words before hold is gone.
        moved = tl.where(
            word == 0, part << offset, part >> tl.minimum(tl.maximum(32 * word - offset, 0), 63)
        )
        within = inside & (offset + low > 32 * word)
        tl.atomic_or(words + (bit >> 5) + word, moved.to(tl.int32), mask=within, sem="relaxed")


@kernel("rows")
def _count(
    raw: tl.tensor,
    table: tl.tensor,
    rows: tl.tensor,
    counts: tl.tensor,
    damaged: tl.tensor,
    BITS: tl.constexpr,
) -> None:
    """Count the set bits of a block of a high part."""
    block = tl.program_id(0)
    if block == 0:
        tl.store(damaged, 0)
    row = row_of(block, table, rows, 10)
    at = (block - tl.load(row)) * (BITS // 8) + tl.arange(0, BITS // 8)
    byte = tl.load(raw + tl.load(row + 8) + at, mask=at < tl.load(row + 9), other=0).to(tl.int32)
    # Add neighbouring counts of 1, 2 and 4 bits.
    byte -= (byte >> 1) & 0x55
    byte = (byte & 0x33) + ((byte >> 2) & 0x33)
    tl.store(counts + block, tl.sum((byte + (byte >> 4)) & 15, 0))


@kernel()
def _low_parts(raw: tl.tensor, rank: tl.tensor, low: tl.tensor, needed: tl.tensor) -> tl.tensor:
    """Return the low parts of entries from the bytes that they are in: at most eight."""
    bit = rank * low
    first, offset = bit >> 3, bit & 7
    part = tl.zeros_like(bit)
    for i in range(0, (low + 14) // 8):
        needed_byte = needed & (8 * i < offset + low)
        byte = tl.load(raw + first + i, mask=needed_byte, other=0).to(bit.dtype)
        # Bytes that are not needed are zero, so their shift only has to be a valid one.
        shift = tl.minimum(tl.maximum(8 * i - offset, 0), 63 if bit.dtype == tl.int64 else 31)
        part |= tl.where(i == 0, byte >> offset, byte << shift)
    return part & ((tl.full(part.shape, 1, part.dtype) << low) - 1)


@kernel("rows")
def _decode(
    raw: tl.tensor,
    table: tl.tensor,
    rows: tl.tensor,
    ends: tl.tensor,
    index: tl.tensor,
    damaged: tl.tensor,
    LOCAL: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    row = row_of(block, table, rows, 10)
    program, start = tl.load(row), tl.load(row + 2)
    entries, low_part, high_part = index + tl.load(row + 1), tl.load(row + 7), tl.load(row + 8)
    # Within a segment. 32 bits take half as many instructions as 64.
    n, k, ones = tl.load(row + 3).to(LOCAL), tl.load(row + 4).to(LOCAL), tl.load(row + 5).to(LOCAL)
    low, size = tl.load(row + 6).to(LOCAL), tl.load(row + 9).to(LOCAL)

    bit = (block - program).to(LOCAL) * BITS + tl.arange(0, BITS)
    inside = bit < 8 * size
    byte = tl.load(raw + high_part + (bit >> 3), mask=inside, other=0).to(LOCAL)
    one = ((byte >> (bit & 7)) & 1).to(tl.int32)
    # Set bits of the segment in the blocks before this one.
    before = tl.load(ends + block - 1, mask=block > 0, other=0)
    before -= tl.load(ends + program - 1, mask=program > 0, other=0)
    rank = before.to(LOCAL) + tl.cumsum(one, 0) - 1
    # A damaged code can have more set bits than entries.
    valid = (one > 0) & (rank < k)
    part = _low_parts(raw + low_part, rank, low, valid)
    # A high part that is too large would give an index of at least n. How large does not matter.
    high = tl.minimum(bit - tl.where(low > 0, rank, 0), ((n - 1) >> low) + 1)
    local = (high << low) | part
    tl.store(entries + rank, start + tl.minimum(local, n - 1), mask=valid)

    # Entries of a bitmap have no low parts to compare.
    follows = inside & (bit > tl.where(low > 0, 0, 8 * size))
    byte = tl.load(raw + high_part + ((bit - 1) >> 3), mask=follows, other=0).to(LOCAL)
    adjacent = valid & ((byte >> ((bit - 1) & 7)) & 1 > 0)
    wrong = adjacent & (part <= _low_parts(raw + low_part, rank - 1, low, adjacent))
    # This also covers the high part's padding: a bit set there decodes to an index of at least n.
    wrong = wrong | (valid & (local >= n))
    bad = tl.sum(wrong.to(tl.int32), 0)
    if (block - program + 1) * BITS >= 8 * size:  # the segment's last block
        total = before.to(LOCAL) + tl.sum(one, 0)
        padding = tl.load(raw + high_part - 1, mask=(k * low) % 8 > 0, other=0).to(LOCAL)
        bad += ((total != ones) | ((padding >> ((k * low) % 8)) > 0)).to(tl.int32)
        for rest in range(total, k, BITS):
            i = rest + tl.arange(0, BITS)
            tl.store(entries + i, start + i, mask=i < k)
    if bad > 0:
        tl.store(damaged, 1)
