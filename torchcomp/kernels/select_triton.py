"""Exact selection in Triton, for CUDA. Shapes are static, and the host never waits.

1. Collect: one pass adds the summands, stores the sum, and collects as *candidates* the entries
   whose magnitude reaches a bound. The bound is the last step's threshold, lowered by a margin.
   Without a last step, it comes from a sample.
2. Radix search: four rounds find the k-th largest magnitude among the candidates. Each counts the
   next digit of the magnitudes' bits. The next kernel chooses the digit from the counts.
3. Every block of the vector counts its candidates above the k-th largest magnitude and those equal
   to it. The counts give the block's offset in the result, and how many equal entries it keeps.
4. Every block writes the indices of the entries that it keeps.

If the bound was too high, there are fewer than k candidates. If it was far too low, they do not fit
into their memory. Steps 2 to 4 then read the whole vector instead. The device decides this from the
number of candidates. The result does not depend on the bound.

Bytes moved per entry of a float32 vector: step 1 reads two summands and writes their sum, 12 in
total, and writes 8 per candidate. Steps 2 to 4 read 28 per candidate and write 8 per selected
entry. With 1 % selected and 1.4 candidates for each, this is 12.6, or 1.05 times the sum alone.
Reading the whole vector instead takes 24 more: once per round, and twice afterwards.
"""

from dataclasses import dataclass
from math import ceil, sqrt

import torch
import triton
import triton.language as tl
from torch import Tensor

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

    # int32 on the device: the last threshold, and the margin below it for the next bound.
    bound: Tensor
    task: tuple[int, int, torch.device]


def select(x: Tensor, k: int, scratch: Scratch, summands: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return the indices that :func:`torchcomp.kernels.select.add_and_select` returns."""
    n, blocks = x.numel(), triton.cdiv(x.numel(), _BLOCK)
    # Enough for a bound that has become too low. For many more, the whole vector is as fast.
    capacity = min(n, 4 * k + _BLOCK)
    with on_device_of(x):
        bound = _bound(x, k, scratch, summands)
        zeros = torch.zeros(_ROUNDS * _BINS + 1, dtype=torch.int32, device=x.device)
        counts, found = zeros[:-1], zeros[-1:]
        keys, positions = torch.empty((2, capacity), dtype=torch.int32, device=x.device)
        # For each block: where its candidates begin, how many they are, how many of them are above
        # the threshold, and how many are equal to it.
        begin, size, above, tied = torch.empty((4, blocks), dtype=torch.int32, device=x.device)
        state = torch.empty(2 * _ROUNDS + 2, dtype=torch.int32, device=x.device)
        chosen = torch.empty(k, dtype=torch.int64, device=x.device)

        g, e = summands or (x, x)
        _collect[(blocks,)](
            g, e, x, bound, found, keys, positions, begin, size, n, capacity,
            ADD=summands is not None, BLOCK=_BLOCK, num_warps=8, **EXACT,
        )  # fmt: skip
        source = x, keys, found, counts, state, n, k, capacity
        for done in range(_ROUNDS):
            _count[(blocks,)](*source, DONE=done, BLOCK=_BLOCK, BINS=_BINS, num_warps=16, **EXACT)
        _tally[(blocks,)](
            *source, begin, size, above, tied,
            DONE=_ROUNDS, BLOCK=_BLOCK, CHUNK=_CHUNK, BINS=_BINS, num_warps=2, **EXACT,
        )  # fmt: skip
        _place[(1,)](
            state,
            above,
            tied,
            bound,
            found,
            blocks,
            k,
            DONE=_ROUNDS,
            CHUNK=_BLOCK,
            num_warps=8,
            **EXACT,
        )
        _write[(blocks,)](
            *source, begin, size, above, tied, positions, chosen,
            DONE=_ROUNDS, BLOCK=_BLOCK, CHUNK=_CHUNK, num_warps=2, **EXACT,
        )  # fmt: skip
    return chosen


def _bound(x: Tensor, k: int, scratch: Scratch, summands: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return two integers: the last threshold, and the margin below it for the bound."""
    n, task = x.numel(), (x.numel(), k, x.device)
    if isinstance(scratch.kept, _Kept) and scratch.kept.task == task:
        return scratch.kept.bound
    bound = torch.empty(2, dtype=torch.int32, device=x.device)
    drawn = min(n, _SAMPLE)
    expected = drawn * k / n
    # With four standard deviations more, the bound is hardly ever too high.
    rank = ceil(expected + 4 * sqrt(expected) + 8)
    g, e = summands or (x, x)
    _sample[(1,)](
        g, e, bound, drawn, n // drawn, rank, _MARGIN,
        ADD=summands is not None, SAMPLE=_SAMPLE, num_warps=16, **EXACT,
    )  # fmt: skip
    scratch.kept = _Kept(bound, task)
    return bound


# --- Steps of the selection -----------------------------------------------------------------------


@kernel("drawn", "step", "rank", "margin")
def _sample(
    g: tl.tensor,
    e: tl.tensor,
    bound: tl.tensor,
    drawn: tl.tensor,
    step: tl.tensor,
    rank: tl.tensor,
    margin: tl.tensor,
    ADD: tl.constexpr,
    SAMPLE: tl.constexpr,
) -> None:
    """Set the bound to the magnitude of a rank in a sample: one entry of every `step`."""
    i = tl.arange(0, SAMPLE)
    inside = i < drawn
    # Scattered, because in a matrix a regular sample could see a few columns only.
    at = i * step + ((i * 40503) & 0xFFFF) % step
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
    # _collect subtracts the margin. It is for the step after this.
    tl.store(bound, reached + margin)
    tl.store(bound + 1, margin)


@kernel("capacity")
def _collect(
    g: tl.tensor,
    e: tl.tensor,
    x: tl.tensor,
    bound: tl.tensor,
    found: tl.tensor,
    keys: tl.tensor,
    positions: tl.tensor,
    begin: tl.tensor,
    size: tl.tensor,
    n: tl.tensor,
    capacity: tl.tensor,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    if ADD:
        value = number(tl.load(g + at, mask=inside, other=0.0))
        value += tl.load(e + at, mask=inside, other=0.0)
        tl.store(x + at, value, mask=inside)
    else:
        value = tl.load(x + at, mask=inside, other=0.0)
    key = magnitude(value)
    # Above zero: of a vector that is mostly zeros, collect the others.
    lowest = tl.maximum(tl.load(bound) - tl.load(bound + 1), 1)
    candidate = (inside & (key >= lowest)).to(tl.int32)
    count = tl.sum(candidate, 0)
    tl.store(size + block, count)
    if count > 0:
        # Blocks reserve their ranges in any order. Nothing depends on where a range is.
        first = tl.atomic_add(found, count, sem="relaxed")
        tl.store(begin + block, first)
        slot = first + tl.cumsum(candidate, 0) - 1
        fits = (candidate > 0) & (slot < capacity)
        tl.store(keys + slot, key, mask=fits)
        tl.store(positions + slot, at, mask=fits)


@kernel()
def _entries(
    found: tl.tensor, n: tl.tensor, k: tl.tensor, capacity: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Return whether to read the whole vector, and the number of entries to look at."""
    count = tl.load(found)
    whole = (count < k) | (count > capacity)
    return whole, tl.where(whole, n, count)


@kernel()
def _keys(
    x: tl.tensor, keys: tl.tensor, at: tl.tensor, stop: tl.tensor, whole: tl.tensor
) -> tl.tensor:
    """Return the magnitudes below `stop`, in the whole vector or in the list of candidates."""
    value = tl.load(x + at, mask=at < tl.where(whole, stop, 0), other=0.0)
    key = tl.load(keys + at, mask=at < tl.where(whole, 0, stop), other=0)
    return tl.where(whole, magnitude(value), key)


@kernel()
def _chosen(
    counts: tl.tensor, state: tl.tensor, k: tl.tensor, DONE: tl.constexpr, BINS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the digits of the k-th largest magnitude that DONE rounds have found.

    Also return its rank among the magnitudes with these digits. State 2 i and 2 i + 1 are both
    results after i rounds.
    """
    prefix, rank = 0, k
    if DONE > 0:
        prefix, rank = tl.load(state + 2 * DONE - 2), tl.load(state + 2 * DONE - 1)
        digits = tl.arange(0, BINS)
        count = tl.load(counts + (DONE - 1) * BINS + digits)
        above = tl.sum(count, 0) - tl.cumsum(count, 0)  # with a larger digit
        # `above + count` falls with the digit. Counting the digits at which it reaches `rank`
        # therefore gives the largest of them plus 1.
        digit = tl.sum((above + count >= rank).to(tl.int32), 0) - 1
        prefix = prefix * BINS + digit
        rank -= tl.sum(tl.where(digits == digit, above, 0), 0)
    return prefix, rank


@kernel("n", "k", "capacity")
def _count(
    x: tl.tensor,
    keys: tl.tensor,
    found: tl.tensor,
    counts: tl.tensor,
    state: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    capacity: tl.tensor,
    DONE: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
) -> None:
    """Count the digits after the first DONE, of entries whose first digits are the chosen ones."""
    block = tl.program_id(0)
    whole, entries = _entries(found, n, k, capacity)
    if block * BLOCK < entries:
        prefix, rank = _chosen(counts, state, k, DONE, BINS)
        if block == 0:
            tl.store(state + 2 * DONE, prefix)
            tl.store(state + 2 * DONE + 1, rank)
        at = block * BLOCK + tl.arange(0, BLOCK)
        matches = at < entries
        key = _keys(x, keys, at, entries, whole)
        if DONE > 0:
            matches = matches & (key >> (32 - 8 * DONE) == prefix)
        digit = (key >> (24 - 8 * DONE)) & (BINS - 1)
        digits = tl.arange(0, BINS)
        # Before Triton 3.3, a histogram has no mask. Count the others as digit 0: no choice depends
        # on how often the lowest digit occurs.
        count = tl.histogram(tl.where(matches, digit, 0), BINS)
        # The mask saves the atomics of empty bins.
        tl.atomic_add(counts + DONE * BINS + digits, count, mask=count > 0, sem="relaxed")


@kernel()
def _range(
    begin: tl.tensor, size: tl.tensor, whole: tl.tensor, n: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return where the entries of a block begin and end, in the vector or among candidates."""
    block = tl.program_id(0)
    start = tl.where(whole, block * BLOCK, tl.load(begin + block))
    length = tl.where(whole, tl.minimum(BLOCK, n - block * BLOCK), tl.load(size + block))
    return start, start + length


@kernel("n", "k", "capacity")
def _tally(
    x: tl.tensor,
    keys: tl.tensor,
    found: tl.tensor,
    counts: tl.tensor,
    state: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    capacity: tl.tensor,
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
    block = tl.program_id(0)
    whole, _ = _entries(found, n, k, capacity)
    threshold, rank = _chosen(counts, state, k, DONE, BINS)
    if block == 0:
        tl.store(state + 2 * DONE, threshold)
        tl.store(state + 2 * DONE + 1, rank)
    larger = tl.zeros((CHUNK,), tl.int32)
    equal = tl.zeros((CHUNK,), tl.int32)
    start, stop = _range(begin, size, whole, n, BLOCK)
    for first in range(start, stop, CHUNK):
        at = first + tl.arange(0, CHUNK)
        inside = at < stop
        key = _keys(x, keys, at, stop, whole)
        larger += (inside & (key > threshold)).to(tl.int32)
        equal += (inside & (key == threshold)).to(tl.int32)
    tl.store(above + block, tl.sum(larger, 0))
    tl.store(tied + block, tl.sum(equal, 0))


@kernel("blocks", "k")
def _place(
    state: tl.tensor,
    above: tl.tensor,
    tied: tl.tensor,
    bound: tl.tensor,
    found: tl.tensor,
    blocks: tl.tensor,
    k: tl.tensor,
    DONE: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Replace the counts: `above` by the block's offset, `tied` by how many of these to keep.

    Of the ties, those of the lowest blocks are kept until the k are complete. The bound for the
    next step follows the candidates: a wider margin if there were hardly enough of them.
    """
    rank = tl.load(state + 2 * DONE + 1)
    ties, offset = 0, 0
    for first in range(0, blocks, CHUNK):
        at = first + tl.arange(0, CHUNK)
        inside = at < blocks
        larger = tl.load(above + at, mask=inside, other=0)
        equal = tl.load(tied + at, mask=inside, other=0)
        before = ties + tl.cumsum(equal, 0) - equal
        quota = tl.minimum(tl.maximum(rank - before, 0), equal)
        kept = larger + quota
        tl.store(above + at, offset + tl.cumsum(kept, 0) - kept, mask=inside)
        tl.store(tied + at, quota, mask=inside)
        ties += tl.sum(equal, 0)
        offset += tl.sum(kept, 0)
    excess, margin = tl.load(found) - k, tl.load(bound + 1)
    change = tl.where(excess > k // 2, -(margin >> 3), tl.where(excess < k // 4, margin >> 3, 0))
    margin = tl.where(excess < 0, 4 * margin, margin + change)
    tl.store(bound, tl.load(state + 2 * DONE))
    # At least a thousandth of an octave, so that it can grow, and at most eight octaves.
    tl.store(bound + 1, tl.minimum(tl.maximum(margin, 1 << 13), 1 << 26))


@kernel("n", "k", "capacity")
def _write(
    x: tl.tensor,
    keys: tl.tensor,
    found: tl.tensor,
    counts: tl.tensor,
    state: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    capacity: tl.tensor,
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
    block = tl.program_id(0)
    whole, _ = _entries(found, n, k, capacity)
    threshold = tl.load(state + 2 * DONE)
    offset, quota = tl.load(above + block), tl.load(tied + block)
    start, stop = _range(begin, size, whole, n, BLOCK)
    for first in range(start, stop, CHUNK):
        at = first + tl.arange(0, CHUNK)
        inside = at < stop
        key = _keys(x, keys, at, stop, whole)
        equal = (inside & (key == threshold)).to(tl.int32)
        keep = inside & ((key > threshold) | ((equal > 0) & (tl.cumsum(equal, 0) <= quota)))
        index = tl.load(positions + at, mask=at < tl.where(whole, 0, stop), other=0)
        index = tl.where(whole, at, index).to(tl.int64)
        kept = keep.to(tl.int32)
        tl.store(chosen + offset + tl.cumsum(kept, 0) - 1, index, mask=keep)
        offset += tl.sum(kept, 0)
        quota -= tl.sum(equal, 0)
