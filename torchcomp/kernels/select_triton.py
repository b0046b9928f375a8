"""Exact selection in Triton, for CUDA. Shapes are static, and the host never waits.

One call selects from all segments of a vector, each by itself: the number of launches does not grow
with the number of segments. For each segment:

1. Collect: one pass adds the summands, stores the sum, and collects as *candidates* the entries
   whose magnitude reaches a bound. The bound is the last step's threshold, lowered by a margin.
   Without a last step, it comes from a sample.
2. Radix search: four rounds find the k-th largest magnitude among the candidates. Each counts the
   next digit of the magnitudes' bits. The next kernel chooses the digit from the counts.
3. Every block of the segment counts its candidates above the k-th largest magnitude and those equal
   to it. The counts give the block's offset in the result, and how many equal entries it keeps.
4. Every block writes the indices of the entries that it keeps.

If the bound was too high, there are fewer than k candidates. If it was far too low, they do not fit
into their memory. Steps 2 to 4 then read the whole segment instead. The device decides this from
the number of candidates. The result does not depend on the bound.

Bytes moved per entry of a float32 vector: step 1 reads two summands and writes their sum, 12 in
total, and writes 8 per candidate. Steps 2 to 4 read 28 per candidate and write 8 per selected
entry. With 1 % selected and 1.4 candidates for each, this is 12.6, or 1.05 times the sum alone.
Reading the whole segment instead takes 24 more: once per round, and twice afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchcomp.kernels.segments import Segment
from torchcomp.kernels.segments_triton import Rows, row_of, table
from torchcomp.kernels.select import Scratch
from torchcomp.kernels.triton_jit import EXACT, kernel, magnitude, number, on_device_of

_BLOCK = 4096
"""Entries per program that reads them in one piece."""

_CHUNK = 256
"""Entries that a program reads at once, of a list whose length only the device knows."""

_SAMPLE = 16384

# Four rounds of 8 bits. Histograms with more bins are slow before Triton 3.7.
_ROUNDS, _BINS = 4, 256

_MARGIN = 1 << 20
"""First margin below the last threshold, in units of float32's last place: 6 to 12 %."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Offsets are 32-bit, and the last block can reach past the end of the vector.
LIMIT = 2**31 - _BLOCK
SUMS = tuple((dtype, torch.float32, torch.float32) for dtype in DTYPES)
"""Supported dtypes of two summands and their sum."""


@dataclass(frozen=True)
class _Kept:
    """What stays in a scratch between steps."""

    # (2, segments) int32 on the device: the last thresholds, and the margins below them for the
    # next bounds.
    bound: Tensor
    task: tuple[tuple[Segment, ...], torch.device]


def select(x: Tensor, k: int, scratch: Scratch, summands: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return the indices that :func:`torchcomp.kernels.select.add_and_select` returns."""
    return select_all(x, [Segment(0, x.numel(), k)], scratch, summands)


def select_all(
    x: Tensor,
    segments: Sequence[Segment],
    scratch: Scratch,
    summands: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Return the indices that :func:`torchcomp.kernels.select.add_and_select_all` returns.

    Args:
        x: 1-D, contiguous, of one of DTYPES, with less than LIMIT elements.
        segments: disjoint parts of `x`. Those with k = 0 are left out, and nothing is summed there.
        scratch: one workspace for all segments.
        summands: None, or two contiguous tensors of the size of `x`, to write their sum to `x`.
    """
    with on_device_of(x):
        rows, programs = table(_placed, x.device, segments, (_BLOCK, _SAMPLE))
        chosen = torch.empty(sum(s.k for s in segments), dtype=torch.int64, device=x.device)
        if programs:
            _launch(x, segments, rows, programs, scratch, summands, chosen)
    return chosen


def _launch(
    x: Tensor,
    segments: Sequence[Segment],
    rows: Tensor,
    programs: int,
    scratch: Scratch,
    summands: tuple[Tensor, Tensor] | None,
    chosen: Tensor,
) -> None:
    count = rows.shape[0]
    bound = _bound(x, segments, rows, scratch, summands)
    zeros = torch.zeros(count * (_ROUNDS * _BINS + 1), dtype=torch.int32, device=x.device)
    counts, found = zeros[count:], zeros[:count]
    capacity = sum(_capacity(n, k, _BLOCK) for _, n, k in segments if k)
    keys, positions = torch.empty((2, capacity), dtype=torch.int32, device=x.device)
    # For each block: where its candidates begin, how many they are, how many of them are above
    # the threshold, and how many are equal to it.
    begin, size, above, tied = torch.empty((4, programs), dtype=torch.int32, device=x.device)
    state = torch.empty((2 * _ROUNDS + 2, count), dtype=torch.int32, device=x.device)

    g, e = summands or (x, x)
    _collect[(programs,)](
        rows, count, g, e, x, bound, found, keys, positions, begin, size,
        ADD=summands is not None, STEP=_step(segments), BLOCK=_BLOCK, num_warps=8, **EXACT,
    )  # fmt: skip
    source = rows, count, x, keys, found, counts, state
    for done in range(_ROUNDS):
        _count[(programs,)](*source, DONE=done, BLOCK=_BLOCK, BINS=_BINS, num_warps=16, **EXACT)
    blocks = begin, size, above, tied
    _tally[(programs,)](
        *source, *blocks,
        DONE=_ROUNDS, BLOCK=_BLOCK, CHUNK=_CHUNK, BINS=_BINS, num_warps=2, **EXACT,
    )  # fmt: skip
    _place[(count,)](
        rows, count, state, above, tied, bound, found,
        DONE=_ROUNDS, CHUNK=_BLOCK, num_warps=8, **EXACT,
    )  # fmt: skip
    _write[(programs,)](
        *source, *blocks, positions, chosen,
        DONE=_ROUNDS, BLOCK=_BLOCK, CHUNK=_CHUNK, num_warps=2, **EXACT,
    )  # fmt: skip


def _bound(
    x: Tensor,
    segments: Sequence[Segment],
    rows: Tensor,
    scratch: Scratch,
    summands: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Return for each segment the last threshold, and the margin below it for the bound."""
    task = tuple(segments), x.device
    if isinstance(scratch.kept, _Kept) and scratch.kept.task == task:
        return scratch.kept.bound
    bound = torch.empty((2, rows.shape[0]), dtype=torch.int32, device=x.device)
    g, e = summands or (x, x)
    _sample[(rows.shape[0],)](
        rows, rows.shape[0], g, e, bound, _MARGIN,
        ADD=summands is not None, SAMPLE=_SAMPLE, num_warps=16, **EXACT,
    )  # fmt: skip
    scratch.kept = _Kept(bound, task)
    return bound


def _capacity(n: int, k: int, block: int) -> int:
    """Return how many candidates fit into the memory of a segment."""
    # Enough for a bound that has become too low. For many more, the whole segment is as fast.
    return min(n, 4 * k + block)


def _step(segments: Sequence[Segment]) -> int:
    """Return a number of which all starts and lengths are multiples: wide accesses need 16."""
    return 16 if all(start % 16 == n % 16 == 0 for start, n, _ in segments) else 1


_WIDTH = tl.constexpr(10)
"""Columns of the table: see the row in `_placed`."""


def _placed(segments: Sequence[Segment], sizes: tuple[int, int]) -> tuple[Rows, int]:
    """Return the row of each segment with k > 0, and the number of programs."""
    block, sample = sizes
    rows: list[tuple[int, ...]] = []
    program, candidate, first = 0, 0, 0
    for start, n, k in segments:
        if k:
            blocks, capacity = triton.cdiv(n, block), _capacity(n, k, block)
            expected = min(n, sample) * k / n
            # With four standard deviations more, the bound is hardly ever too high.
            rank = ceil(expected + 4 * sqrt(expected) + 8)
            own = len(rows), start, n, k, candidate, capacity, first, blocks, rank
            rows.append((program, *own))
            program, candidate, first = program + blocks, candidate + capacity, first + k
    return tuple(rows), program


# --- Steps of the selection -----------------------------------------------------------------------


@kernel()
def _column(row: tl.tensor, column: tl.constexpr) -> tl.tensor:
    """Return a number of a segment that has 32 bits."""
    return tl.load(row + column).to(tl.int32)


@kernel("rows", "margin")
def _sample(
    table: tl.tensor,
    rows: tl.tensor,
    g: tl.tensor,
    e: tl.tensor,
    bound: tl.tensor,
    margin: tl.tensor,
    ADD: tl.constexpr,
    SAMPLE: tl.constexpr,
) -> None:
    """Set the bound to the magnitude of a rank in a sample: one entry of every `step`."""
    row = table + tl.program_id(0) * _WIDTH
    n, rank = _column(row, 3), _column(row, 9)
    drawn = tl.minimum(n, SAMPLE)
    step = n // drawn
    i = tl.arange(0, SAMPLE)
    inside = i < drawn
    # Scattered, because in a matrix a regular sample could see a few columns only.
    at = _column(row, 2) + i * step + ((i * 40503) & 0xFFFF) % step
    value = number(tl.load(g + at, mask=inside, other=0.0))
    if ADD:
        value += number(tl.load(e + at, mask=inside, other=0.0))
    key = magnitude(value)
    # The largest key that `rank` entries reach, bit by bit from the highest.
    reached = 0
    for bit in range(31):
        trial = reached | (1 << (30 - bit))
        count = tl.sum((inside & (key >= trial)).to(tl.int32), 0)
        reached = tl.where(count >= rank, trial, reached)
    bound += tl.program_id(0)
    # _collect subtracts the margin. It is for the step after this.
    tl.store(bound, reached + margin)
    tl.store(bound + rows, margin)


@kernel("rows")
def _collect(
    table: tl.tensor,
    rows: tl.tensor,
    g: tl.tensor,
    e: tl.tensor,
    x: tl.tensor,
    bound: tl.tensor,
    found: tl.tensor,
    keys: tl.tensor,
    positions: tl.tensor,
    begin: tl.tensor,
    size: tl.tensor,
    ADD: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    row = row_of(program, table, rows, _WIDTH)
    segment, capacity = _column(row, 1), _column(row, 6)
    start = tl.multiple_of(_column(row, 2), STEP)
    n = tl.multiple_of(_column(row, 3), STEP)
    local = (program - _column(row, 0)) * BLOCK + tl.arange(0, BLOCK)
    inside = local < n
    at = start + local
    if ADD:
        value = number(tl.load(g + at, mask=inside, other=0.0))
        value += tl.load(e + at, mask=inside, other=0.0)
        tl.store(x + at, value, mask=inside)
    else:
        value = tl.load(x + at, mask=inside, other=0.0)
    key = magnitude(value)
    # Above zero: of a vector that is mostly zeros, collect the others.
    lowest = tl.maximum(tl.load(bound + segment) - tl.load(bound + rows + segment), 1)
    candidate = (inside & (key >= lowest)).to(tl.int32)
    count = tl.sum(candidate, 0)
    tl.store(size + program, count)
    if count > 0:
        # Blocks reserve their ranges in any order. Nothing depends on where a range is.
        first = tl.atomic_add(found + segment, count, sem="relaxed")
        tl.store(begin + program, first)
        slot = first + tl.cumsum(candidate, 0) - 1
        fits = (candidate > 0) & (slot < capacity)
        slot += _column(row, 5)
        tl.store(keys + slot, key, mask=fits)
        tl.store(positions + slot, local, mask=fits)


@kernel()
def _entries(row: tl.tensor, found: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return whether to read the whole segment, and the number of entries to look at."""
    count = tl.load(found + _column(row, 1))
    whole = (count < _column(row, 4)) | (count > _column(row, 6))
    return whole, tl.where(whole, _column(row, 3), count)


@kernel()
def _keys(
    row: tl.tensor,
    x: tl.tensor,
    keys: tl.tensor,
    at: tl.tensor,
    stop: tl.tensor,
    whole: tl.tensor,
) -> tl.tensor:
    """Return the magnitudes below `stop`, in the whole segment or in its list of candidates."""
    value = tl.load(x + (_column(row, 2) + at), mask=at < tl.where(whole, stop, 0), other=0.0)
    key = tl.load(keys + (_column(row, 5) + at), mask=at < tl.where(whole, 0, stop), other=0)
    return tl.where(whole, magnitude(value), key)


@kernel()
def _chosen(
    row: tl.tensor,
    rows: tl.tensor,
    counts: tl.tensor,
    state: tl.tensor,
    DONE: tl.constexpr,
    BINS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the digits of the k-th largest magnitude that DONE rounds have found.

    Also return its rank among the magnitudes with these digits. State 2 i and 2 i + 1 are both
    results after i rounds.
    """
    prefix, rank = 0, _column(row, 4)
    if DONE > 0:
        segment = _column(row, 1)
        prefix = tl.load(state + (2 * DONE - 2) * rows + segment)
        rank = tl.load(state + (2 * DONE - 1) * rows + segment)
        digits = tl.arange(0, BINS)
        count = tl.load(counts + ((DONE - 1) * rows + segment) * BINS + digits)
        above = tl.sum(count, 0) - tl.cumsum(count, 0)  # with a larger digit
        # `above + count` falls with the digit. Counting the digits at which it reaches `rank`
        # therefore gives the largest of them plus 1.
        digit = tl.sum((above + count >= rank).to(tl.int32), 0) - 1
        prefix = prefix * BINS + digit
        rank -= tl.sum(tl.where(digits == digit, above, 0), 0)
    return prefix, rank


@kernel("rows")
def _count(
    table: tl.tensor,
    rows: tl.tensor,
    x: tl.tensor,
    keys: tl.tensor,
    found: tl.tensor,
    counts: tl.tensor,
    state: tl.tensor,
    DONE: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
) -> None:
    """Count the digits after the first DONE, of entries whose first digits are the chosen ones."""
    row = row_of(tl.program_id(0), table, rows, _WIDTH)
    block = tl.program_id(0) - _column(row, 0)
    whole, entries = _entries(row, found)
    if block * BLOCK < entries:
        prefix, rank = _chosen(row, rows, counts, state, DONE, BINS)
        segment = _column(row, 1)
        if block == 0:
            tl.store(state + 2 * DONE * rows + segment, prefix)
            tl.store(state + (2 * DONE + 1) * rows + segment, rank)
        at = block * BLOCK + tl.arange(0, BLOCK)
        matches = at < entries
        key = _keys(row, x, keys, at, entries, whole)
        if DONE > 0:
            matches = matches & (key >> (32 - 8 * DONE) == prefix)
        digit = (key >> (24 - 8 * DONE)) & (BINS - 1)
        digits = tl.arange(0, BINS)
        # Count the others as digit 0: no choice depends on how often the lowest digit occurs.
        count = tl.histogram(tl.where(matches, digit, 0), BINS)
        # The mask saves the atomics of empty bins.
        bins = counts + (DONE * rows + segment) * BINS + digits
        tl.atomic_add(bins, count, mask=count > 0, sem="relaxed")


@kernel()
def _range(
    row: tl.tensor, begin: tl.tensor, size: tl.tensor, whole: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return where the entries of a block begin and end, in the segment or among candidates."""
    program = tl.program_id(0)
    first = (program - _column(row, 0)) * BLOCK
    start = tl.where(whole, first, tl.load(begin + program))
    length = tl.where(whole, tl.minimum(BLOCK, _column(row, 3) - first), tl.load(size + program))
    return start, start + length


@kernel("rows")
def _tally(
    table: tl.tensor,
    rows: tl.tensor,
    x: tl.tensor,
    keys: tl.tensor,
    found: tl.tensor,
    counts: tl.tensor,
    state: tl.tensor,
    begin: tl.tensor,
    size: tl.tensor,
    above: tl.tensor,
    tied: tl.tensor,
    DONE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
) -> None:
    """Count a block's entries above and equal to the k-th largest magnitude."""
    program = tl.program_id(0)
    row = row_of(program, table, rows, _WIDTH)
    whole, _ = _entries(row, found)
    threshold, rank = _chosen(row, rows, counts, state, DONE, BINS)
    if program == _column(row, 0):
        tl.store(state + 2 * DONE * rows + _column(row, 1), threshold)
        tl.store(state + (2 * DONE + 1) * rows + _column(row, 1), rank)
    larger = tl.zeros((CHUNK,), tl.int32)
    equal = tl.zeros((CHUNK,), tl.int32)
    start, stop = _range(row, begin, size, whole, BLOCK)
    for first in range(start, stop, CHUNK):
        at = first + tl.arange(0, CHUNK)
        inside = at < stop
        key = _keys(row, x, keys, at, stop, whole)
        larger += (inside & (key > threshold)).to(tl.int32)
        equal += (inside & (key == threshold)).to(tl.int32)
    tl.store(above + program, tl.sum(larger, 0))
    tl.store(tied + program, tl.sum(equal, 0))


@kernel("rows")
def _place(
    table: tl.tensor,
    rows: tl.tensor,
    state: tl.tensor,
    above: tl.tensor,
    tied: tl.tensor,
    bound: tl.tensor,
    found: tl.tensor,
    DONE: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Replace the counts: `above` by the block's offset, `tied` by how many of these to keep.

    Of the ties, those of the lowest blocks are kept until the k are complete. The bound for the
    next step follows the candidates: a wider margin if there were hardly enough of them.
    """
    segment = tl.program_id(0)
    row = table + segment * _WIDTH
    k, blocks = _column(row, 4), _column(row, 8)
    rank = tl.load(state + (2 * DONE + 1) * rows + segment)
    ties, offset = 0, _column(row, 7)
    for first in range(0, blocks, CHUNK):
        local = first + tl.arange(0, CHUNK)
        inside = local < blocks
        at = _column(row, 0) + local
        larger = tl.load(above + at, mask=inside, other=0)
        equal = tl.load(tied + at, mask=inside, other=0)
        before = ties + tl.cumsum(equal, 0) - equal
        quota = tl.minimum(tl.maximum(rank - before, 0), equal)
        kept = larger + quota
        tl.store(above + at, offset + tl.cumsum(kept, 0) - kept, mask=inside)
        tl.store(tied + at, quota, mask=inside)
        ties += tl.sum(equal, 0)
        offset += tl.sum(kept, 0)
    excess, margin = tl.load(found + segment) - k, tl.load(bound + rows + segment)
    change = tl.where(excess > k // 2, -(margin >> 3), tl.where(excess < k // 4, margin >> 3, 0))
    margin = tl.where(excess < 0, 4 * margin, margin + change)
    tl.store(bound + segment, tl.load(state + 2 * DONE * rows + segment))
    # At least a thousandth of an octave, so that it can grow, and at most eight octaves.
    tl.store(bound + rows + segment, tl.minimum(tl.maximum(margin, 1 << 13), 1 << 26))


@kernel("rows")
def _write(
    table: tl.tensor,
    rows: tl.tensor,
    x: tl.tensor,
    keys: tl.tensor,
    found: tl.tensor,
    counts: tl.tensor,
    state: tl.tensor,
    begin: tl.tensor,
    size: tl.tensor,
    above: tl.tensor,
    tied: tl.tensor,
    positions: tl.tensor,
    chosen: tl.tensor,
    DONE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Write the indices of the entries that a block keeps, in ascending order."""
    program = tl.program_id(0)
    row = row_of(program, table, rows, _WIDTH)
    whole, _ = _entries(row, found)
    threshold = tl.load(state + 2 * DONE * rows + _column(row, 1))
    offset, quota = tl.load(above + program), tl.load(tied + program)
    start, stop = _range(row, begin, size, whole, BLOCK)
    for first in range(start, stop, CHUNK):
        at = first + tl.arange(0, CHUNK)
        inside = at < stop
        key = _keys(row, x, keys, at, stop, whole)
        equal = (inside & (key == threshold)).to(tl.int32)
        keep = inside & ((key > threshold) | ((equal > 0) & (tl.cumsum(equal, 0) <= quota)))
        listed = positions + (_column(row, 5) + at)
        local = tl.load(listed, mask=at < tl.where(whole, 0, stop), other=0)
        index = tl.where(whole, at, local) + _column(row, 2)
        kept = keep.to(tl.int32)
        tl.store(chosen + offset + tl.cumsum(kept, 0) - 1, index.to(tl.int64), mask=keep)
        offset += tl.sum(kept, 0)
        quota -= tl.sum(equal, 0)
