"""Selection of the entries of largest magnitude of the segments of a vector in Triton, for CUDA.

7 launches select, and write the index code to a frame. For each segment:

1. `collect`: one pass adds the summands, stores the sum, and collects as *candidates* the entries
   whose magnitude reaches a bound: the last step's threshold, lowered by a margin.
2. `count_digits`, four times: a radix search finds the k-th largest magnitude among the
   candidates. Each launch counts the next digit of the magnitudes' bits. The next one chooses it.
3. `tally`: every block counts its candidates above the k-th largest magnitude and those equal to
   it. It sets the bytes of the index code in the frame to zero.
4. `write`: the counts of the blocks before it tell a block where its entries are in the message,
   and how many equal ones it keeps. It writes their indices and sets their bits in the index code.

If the bound was too high or far too low, as in the first step, the device sees that by the number
of candidates, and steps 2 to 4 read the whole segment: the bound never changes the result. Owners
of shards can select together: they add up the counts of steps 1 and 2, and `share` tells each how
many equal ones it keeps. `write` zeroes every counter.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from torchcomp.engine import host
from torchcomp.kernels import table_triton as col
from torchcomp.kernels.coding_triton import set_bits
from torchcomp.kernels.frames_triton import Format
from torchcomp.kernels.launch import Launch
from torchcomp.kernels.segments import Segment, digit_bits
from torchcomp.kernels.table_triton import SIZES, Table, column, segment_of, tabled
from torchcomp.kernels.triton_jit import kernel, magnitude, number, rounded

_MARGIN = 1 << 20
"""First margin below the last threshold, in units of float32's last place: 6 to 12 %."""


class Selecting:
    """Selection from the segments of a vector. Workspaces are for one stream at a time."""

    shared = False
    """Whether other ranks select from other parts of the same segments."""

    def __init__(self, table: Table, bits: int = 8) -> None:
        self._table, self._bits, rows, device = table, bits, table.count, table.rows.device
        self._rounds = 32 // bits
        self._counters = torch.zeros(
            rows * (3 + (self._rounds << bits)), dtype=torch.int32, device=device
        )
        self._found, self._pairs, self._counts = torch.split(
            self._counters, [rows, 2 * rows, self._rounds * rows << bits]
        )
        self._clean = True
        self._bound = torch.full((2 * rows,), _MARGIN, dtype=torch.int32, device=device)
        lengths = [
            4 * table.programs["block"], 2 * table.programs["group"],
            2 * self._rounds * rows, 3 * rows,
        ]  # fmt: skip
        memory = torch.empty(sum(lengths), dtype=torch.int32, device=device)
        self._blocks, self._groups, self._state, self._result = torch.split(memory, lengths)
        self._launches: dict[object, list[Launch]] = {}

    def select(
        self, g: Tensor, e: Tensor, x: Tensor, frame: Tensor | None = None, bound: Any = None
    ) -> Tensor:
        """Write ``g + e`` to `x`, and select from it. If `g` is `x`, select from it as it is."""
        index = torch.empty(self._table.entries, dtype=torch.int64, device=x.device)
        if not self._table.programs["block"]:
            return index
        bound = self._bound if bound is None else bound
        kind = "select", g is not x, frame is not None
        collect, *counts, tally, write = self._launches.get(kind) or self._selection(kind)
        if not self._clean:  # an earlier call did not end
            self._counters.zero_()
        self._clean = False
        work = torch.empty(2 * self._table.capacity, dtype=torch.int32, device=x.device)
        out = x if frame is None else frame
        collect(g, e, x, work, bound)
        summed = self._summed()
        for done, count in enumerate(counts):
            count(x, work, summed)
            self._add_up(done)
        tally(x, work, out, summed)
        self._decide()
        write(x, work, out, index)
        self._clean = True
        return index

    # What owners do who select together: add up the counts, of each round, and share the entries.

    def _summed(self) -> Tensor:
        return self._found

    def _add_up(self, done: int) -> None:
        pass

    def _decide(self) -> None:
        pass

    def _selection(self, kind: tuple[Any, ...]) -> list[Launch]:
        _, add, frame = kind
        table, counts = self._table, self._counts
        found, blocks, groups = self._found, self._blocks, self._groups
        place, grid = (table.rows, table.count), (table.programs["block"],)
        tallied = {"BLOCK": SIZES["block"], "GROUPED": SIZES["group"]}
        every = {**tallied, "FRAME": frame, "DONE": self._rounds, "CHUNK": SIZES["chunk"]}
        made = self._launches[kind] = [
            Launch(
                collect, grid, *place, self._bound[table.count :], found, blocks, groups,
                ADD=add, STEP=table.step, warps=8, **tallied,
            ),
            *(
                Launch(
                    count_digits, (table.programs["count"],),
                    *place, found, counts, self._state,
                    DONE=done, BLOCK=SIZES["count"], BITS=self._bits, warps=8,
                )
                for done in range(self._rounds if table.entries or self.shared else 0)
            ),
            Launch(
                tally, grid, *place, self._bound, found, blocks, groups, self._pairs,
                counts, self._state, self._result,
                SHARED=self.shared, BINS=1 << self._bits, warps=2, **every,
            ),
            Launch(
                write, grid, *place, found, blocks, groups, counts, self._result,
                BINS=1 << self._bits, warps=2, **every,
            ),
        ]  # fmt: skip
        return made


class Search(Selecting):
    """The search for the entries that owners keep together; see :mod:`.searches`."""

    shared = True

    def __init__(
        self,
        segments: Sequence[Segment],
        at: Sequence[int],
        sizes: Sequence[int],
        searched: Sequence[bool],
        exchange: Any,
        device: torch.device,
    ) -> None:
        # Whatever the format: nothing is written to frames here.
        table = tabled([(s, 0) for s in segments], Format(None, torch.float32), device, sizes)
        super().__init__(table, digit_bits(len(segments)))
        places = torch.full((exchange.world_size * len(segments),), -1, dtype=torch.int64)
        places[torch.tensor(at, dtype=torch.int64)] = torch.arange(len(at))
        self._exchange, self._pieces = exchange, len(at)
        self._share = Launch(
            share, (len(segments),), table.rows, len(segments),
            self._pairs, self._result,
            host.copy_to(torch.tensor(searched, dtype=torch.int32), device),
            host.copy_to(places, device), exchange.world_size, exchange.rank,
        )  # fmt: skip
        self._each = torch.split(self._counts, len(segments) << self._bits)

    def __call__(
        self, g: Tensor, e: Tensor, x: Tensor, before: Tensor, after: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Do as :class:`.searches.HostSearch` does, with room for more indices in each piece."""
        numbers = torch.empty(self._pieces, dtype=torch.int64, device=x.device)
        self._outcome = numbers, after
        return self.select(g, e, x, None, before), numbers

    def _summed(self) -> Tensor:
        summed = self._found.clone()
        self._exchange.all_reduce(summed)
        return summed

    def _add_up(self, done: int) -> None:
        self._exchange.all_reduce(self._each[done])

    def _decide(self) -> None:
        self._share(*self._outcome, self._exchange.all_gather_rows(self._pairs))


@kernel("rows", "ranks", "rank")
def share(counts, after, gathered, table, rows, pairs, result, searched, places, ranks, rank):
    """Share the k entries of a segment among the owners: equal ones go to the lowest ranks."""
    segment = tl.program_id(0)
    tl.store(pairs + 2 * segment, 0)
    tl.store(pairs + 2 * segment + 1, 0)
    left = tl.load(result + 3 * segment + 1)
    remembered = tl.load(result + 3 * segment) * tl.load(searched + segment)
    tl.store(after + segment, remembered.to(after.dtype.element_ty))
    for owner in range(0, ranks):
        pair = gathered + 2 * (owner * rows + segment)
        taken = tl.minimum(tl.load(pair + 1), left)
        left -= taken
        place = tl.load(places + owner * rows + segment)
        tl.store(
            counts + place, (tl.load(pair) + taken).to(counts.dtype.element_ty), mask=place >= 0
        )
        if owner == rank:
            tl.store(result + 3 * segment + 1, taken)


@kernel("rows")
def collect(
    g, e, x, work, bound, table, rows, margins, found, blocks, groups,
    ADD: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Add, store and collect."""
    program = tl.program_id(0)
    row = segment_of(program, table, rows, col.BLOCK_PROGRAM)
    segment, capacity, k = column(row, col.SEGMENT), column(row, col.CAPACITY), column(row, col.K)
    start = tl.multiple_of(column(row, col.START), STEP)
    n = tl.multiple_of(column(row, col.N), STEP)
    block = program - column(row, col.BLOCK_PROGRAM)
    local = block * BLOCK + tl.arange(0, BLOCK)
    inside = local < n
    at = start + local
    if ADD:
        value = number(tl.load(g + at, mask=inside, other=0.0))
        value += number(tl.load(e + at, mask=inside, other=0.0))
        total = rounded(value, x.dtype.element_ty)
        tl.store(x + at, total, mask=inside)
    else:
        total = tl.load(x + at, mask=inside, other=0.0)
    key = magnitude(total)
    # Above zero: of a vector that is mostly zeros, collect the others.
    reached = tl.minimum(tl.maximum(tl.load(bound + segment), 0), 0x7FFFFFFF).to(tl.int32)
    lowest = tl.maximum(reached - tl.load(margins + segment), 1)
    candidate = (inside & (key >= lowest) & (k > 0)).to(tl.int32)
    count = tl.sum(candidate, 0)
    tl.store(blocks + 4 * program + 1, count)
    if block % GROUPED == 0:
        group = groups + 2 * (column(row, col.GROUP) + block // GROUPED)
        tl.store(group, 0)
        tl.store(group + 1, 0)
    if count > 0:
        # Blocks reserve their ranges in any order. Nothing depends on where a range is.
        first = tl.atomic_add(found + segment, count, sem="relaxed")
        tl.store(blocks + 4 * program, first)
        slot = first + tl.cumsum(candidate, 0) - 1
        fits = (candidate > 0) & (slot < capacity)
        slot = 2 * (slot + column(row, col.CANDIDATE))
        tl.store(work + slot, key, mask=fits)
        tl.store(work + slot + 1, local, mask=fits)


@kernel()
def entries(row, found, summed):
    """Return whether to read the whole segment, and the number of entries to look at."""
    count = tl.load(found + column(row, col.SEGMENT))
    few = tl.load(summed + column(row, col.SEGMENT)) < column(row, col.K)
    whole = few | (count > column(row, col.CAPACITY))
    return whole, tl.where(whole, column(row, col.N), count)


@kernel()
def keys_from(row, x, work, first, stop, whole, SIZE: tl.constexpr):
    """Return SIZE positions from `first` on, which are below `stop`, and their magnitudes."""
    at = first + tl.arange(0, SIZE)
    value = tl.load(
        x + (column(row, col.START) + at), mask=at < tl.where(whole, stop, 0), other=0.0
    )
    listed = work + 2 * (column(row, col.CANDIDATE) + at)
    key = tl.load(listed, mask=at < tl.where(whole, 0, stop), other=0)
    return at, at < stop, tl.where(whole, magnitude(value), key)


@kernel()
def chosen(row, rows, counts, state, DONE: tl.constexpr, BINS: tl.constexpr):
    """Return the digits of the k-th largest magnitude that DONE rounds have found."""
    prefix, rank = 0, column(row, col.K)
    if DONE > 0:
        segment = column(row, col.SEGMENT)
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
def count_digits(
    x, work, summed, table, rows, found, counts, state,
    DONE: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Count the digits after the first DONE, of entries whose first digits are the chosen ones."""
    BINS: tl.constexpr = 1 << BITS
    row = segment_of(tl.program_id(0), table, rows, col.COUNT_PROGRAM)
    own = tl.program_id(0) - column(row, col.COUNT_PROGRAM)
    whole, total = entries(row, found, summed)
    if (own == 0) | (own * BLOCK < total):
        prefix, rank = chosen(row, rows, counts, state, DONE, BINS)
        segment = column(row, col.SEGMENT)
        if own == 0:
            tl.store(state + 2 * DONE * rows + segment, prefix)
            tl.store(state + (2 * DONE + 1) * rows + segment, rank)
        digits = tl.arange(0, BINS)
        # Enough programs for the candidates. For a whole segment, each reads several blocks.
        for first in range(own * BLOCK, total, column(row, col.COUNT_PROGRAMS) * BLOCK):
            _, matches, key = keys_from(row, x, work, first, total, whole, BLOCK)
            if DONE > 0:
                matches = matches & (key >> (32 - BITS * DONE) == prefix)
            digit = (key >> (32 - BITS - BITS * DONE)) & (BINS - 1)
            # Count the others as digit 0: no choice depends on how often the lowest digit occurs.
            found_here = tl.histogram(tl.where(matches, digit, 0), BINS)
            # The mask saves the atomics of empty bins.
            bins = counts + (DONE * rows + segment) * BINS + digits
            tl.atomic_add(bins, found_here, mask=found_here > 0, sem="relaxed")


@kernel()
def block_range(row, block, blocks, whole, BLOCK: tl.constexpr):
    """Return where the entries of a block begin and end, in the segment or among candidates."""
    own = blocks + 4 * tl.program_id(0)
    start = tl.where(whole, block * BLOCK, tl.load(own))
    length = tl.where(
        whole, tl.minimum(BLOCK, column(row, col.N) - block * BLOCK), tl.load(own + 1)
    )
    return start, start + length


@kernel("rows")
def tally(
    x, work, frame, summed, table, rows, bound, found, blocks, groups, pairs, counts, state, result,
    SHARED: tl.constexpr, FRAME: tl.constexpr, DONE: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, BINS: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Count a block's entries above and equal to the k-th largest magnitude."""
    program = tl.program_id(0)
    row = segment_of(program, table, rows, col.BLOCK_PROGRAM)
    block = program - column(row, col.BLOCK_PROGRAM)
    whole, _total = entries(row, found, summed)
    threshold, rank = chosen(row, rows, counts, state, DONE, BINS)
    if block == 0:
        segment = column(row, col.SEGMENT)
        tl.store(result + 3 * segment, threshold)
        tl.store(result + 3 * segment + 1, rank)
        tl.store(result + 3 * segment + 2, whole.to(tl.int32))
        if not SHARED:
            follow(row, rows, bound, found, threshold)
    if FRAME:
        begin, end = tl.load(row + col.CODE), tl.load(row + col.END)
        share = column(row, col.SHARE)
        begin += block.to(tl.int64) * share
        for first in range(0, share, CHUNK):
            zeroed = first + tl.arange(0, CHUNK)
            inside = (zeroed < share) & (begin + zeroed < end)
            tl.store(frame + begin + zeroed, tl.zeros((CHUNK,), tl.uint8), mask=inside)
    larger = tl.zeros((CHUNK,), tl.int32)
    equal = tl.zeros((CHUNK,), tl.int32)
    start, stop = block_range(row, block, blocks, whole, BLOCK)
    for first in range(start, stop, CHUNK):
        _, inside, key = keys_from(row, x, work, first, stop, whole, CHUNK)
        larger += (inside & (key > threshold)).to(tl.int32)
        equal += (inside & (key == threshold)).to(tl.int32)
    above, tied = tl.sum(larger, 0), tl.sum(equal, 0)
    tl.store(blocks + 4 * program + 2, above)
    tl.store(blocks + 4 * program + 3, tied)
    group = groups + 2 * (column(row, col.GROUP) + block // GROUPED)
    if above > 0:
        tl.atomic_add(group, above, sem="relaxed")
    if tied > 0:
        tl.atomic_add(group + 1, tied, sem="relaxed")
    if SHARED:
        pair = pairs + 2 * column(row, col.SEGMENT)
        tl.atomic_add(pair, above, sem="relaxed")
        tl.atomic_add(pair + 1, tied, sem="relaxed")


@kernel("rows")
def follow(row, rows, bound, found, threshold):
    """Set the bound of the next step."""
    segment, k = column(row, col.SEGMENT), column(row, col.K)
    excess, margin = tl.load(found + segment) - k, tl.load(bound + rows + segment)
    change = tl.where(excess > k // 2, -(margin >> 3), tl.where(excess < k // 4, margin >> 3, 0))
    margin = tl.where(excess < 0, 4 * margin, margin + change)
    tl.store(bound + segment, threshold)
    # At least a thousandth of an octave, so that it can grow, and at most eight octaves.
    tl.store(bound + rows + segment, tl.minimum(tl.maximum(margin, 1 << 13), 1 << 26))


@kernel()
def sums_before(counts, first, stop, STEP: tl.constexpr, CHUNK: tl.constexpr):
    """Return the sums of both numbers in the rows of STEP numbers from `first` to `stop`."""
    above = tl.zeros((CHUNK,), tl.int32)
    tied = tl.zeros((CHUNK,), tl.int32)
    for part in range(first, stop, CHUNK):
        i = part + tl.arange(0, CHUNK)
        above += tl.load(counts + STEP * i, mask=i < stop, other=0)
        tied += tl.load(counts + STEP * i + 1, mask=i < stop, other=0)
    return tl.sum(above, 0), tl.sum(tied, 0)


@kernel("rows")
def write(
    x, work, frame, index, table, rows, found, blocks, groups, counts, result,
    FRAME: tl.constexpr, DONE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    BINS: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Write the indices of the entries that a block keeps, in ascending order, and their code."""
    program = tl.program_id(0)
    row = segment_of(program, table, rows, col.BLOCK_PROGRAM)
    segment, block = column(row, col.SEGMENT), program - column(row, col.BLOCK_PROGRAM)
    if block == 0:  # the counters of the next step
        tl.store(found + segment, 0)
        bins = tl.arange(0, BINS)
        for done in tl.static_range(DONE):
            zeros = tl.zeros((BINS,), tl.int32)
            tl.store(counts + (done * rows + segment) * BINS + bins, zeros)
    threshold, rank = tl.load(result + 3 * segment), tl.load(result + 3 * segment + 1)
    whole = tl.load(result + 3 * segment + 2) > 0
    group = column(row, col.GROUP)
    above, ties = sums_before(groups, group, group + block // GROUPED, 2, CHUNK)
    more, others = sums_before(blocks + 2, program - block % GROUPED, program, 4, CHUNK)
    above, ties = above + more, ties + others
    # The first entry of the block within the segment, and how many equal ones are left to keep.
    offset, quota = above + tl.minimum(ties, rank), tl.maximum(rank - ties, 0)
    start, stop = block_range(row, block, blocks, whole, BLOCK)
    for first in range(start, stop, CHUNK):
        at, inside, key = keys_from(row, x, work, first, stop, whole, CHUNK)
        equal = (inside & (key == threshold)).to(tl.int32)
        keep = inside & ((key > threshold) | ((equal > 0) & (tl.cumsum(equal, 0) <= quota)))
        listed = work + 2 * (column(row, col.CANDIDATE) + at) + 1
        local = tl.where(whole, at, tl.load(listed, mask=at < tl.where(whole, 0, stop), other=0))
        kept = keep.to(tl.int32)
        i = offset + tl.cumsum(kept, 0) - 1
        place = index + column(row, col.FIRST) + i
        tl.store(place, (local + column(row, col.START)).to(index.dtype.element_ty), mask=keep)
        if FRAME:
            set_bits(row, frame, i, local, keep & (column(row, col.CODED) > 0))
        offset += tl.sum(kept, 0)
        quota -= tl.sum(equal, 0)
