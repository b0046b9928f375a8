"""Exact selection in Numba, for the CPU. It takes little more than one pass over the memory.

A selection

1. guesses a lower bound of the k-th largest magnitude, from the last selection or from a sample;
2. collects the candidates in one pass: the entries whose magnitude is not below the guess. The pass
   splits the vector into chunks, and adds the summands if there are any;
3. finds the k-th largest magnitude among the candidates with a radix search, 12 bits per round. The
   first histogram is made chunk by chunk in step 2. Later rounds read the keys of one bin;
4. writes the candidates above that magnitude and, from the lowest index on, those equal to it.

If a guess from the last selection gives too few or too many candidates, the next guess comes from a
sample. If that fails as well, steps 3 and 4 use the whole vector. The guess affects only the speed,
never the result.

Magnitudes are compared by their bits, which have the same order. NaN counts as infinity.
"""

import math
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from torchcomp.kernels import pool
from torchcomp.kernels.elias_fano_numba import ones, trailing_zeros
from torchcomp.kernels.numba_jit import kernel

Array = NDArray[Any]

_SMALL = 1 << 14
"""Up to this many entries, all entries are candidates: drawing a sample would take longer."""

_INLINE = 1 << 20
"""Like :data:`.pool.INLINE`, but for a pass that does less work per entry."""

_TIGHT, _LOOSE = 0.25, 2.0
"""Minimum and maximum number of excess candidates that a guess aims at, in units of k."""

_WORD = 64
"""Number of entries that are compared together. Each sets one bit of a 64-bit integer."""

_BURST = 4
"""Number of candidates that are stored without a branch in between."""

_DIGIT = 12
"""Bits of a magnitude per round of the radix search: a histogram has 2^12 bins."""

_BINS = 1 << _DIGIT

_OCTAVES = 8
"""Powers of two above the bound that the first histogram divides into bins."""

_FORMATS = {
    torch.float16: (torch.uint16, 10, 0x7C00),
    torch.bfloat16: (torch.uint16, 7, 0x7F80),
    torch.float32: (torch.uint32, 23, 0x7F800000),
    torch.float64: (torch.uint64, 52, 0x7FF0000000000000),
}
"""For each dtype: the integer dtype of its bits, the mantissa's width, and the bits of infinity."""

SUMS = (
    (torch.float32, torch.float32, torch.float32),
    (torch.bfloat16, torch.float32, torch.float32),
    (torch.float64, torch.float64, torch.float64),
)
"""Supported dtypes of two summands and their sum."""


class Candidates:
    """The candidates of a vector, and the bound for collecting the next ones.

    The bound affects only the speed: any vector of the length and dtype can come next. Only one
    thread can use an instance at a time.

    Attributes:
        n: length of the vector.
        k: number of entries to select, 0 < k < n.
        dtype: dtype of the vector, any of fp16, bf16, fp32 and fp64.
        ends: offsets of the chunks: chunk i spans ``ends[i]`` to ``ends[i + 1]``.
        keys: magnitudes of the candidates as bits, one row per chunk.
        positions: positions of the candidates in their chunk, shaped like `keys`.
        counts: number of candidates of each chunk; -1 if its row was too short.
        histograms: the first histogram of the radix search, one row per chunk.
        limits: a mask of all bits except the sign, and the bits of infinity.
        lowest: bits of the bound for the next selection; None at the start.
        spare: number of excess candidates that the bound aims at, in units of k.
    """

    def __init__(self, n: int, k: int, dtype: torch.dtype) -> None:
        self.n, self.k, self.dtype = n, k, dtype
        self.word, self.mantissa, self.infinity = _FORMATS[dtype]
        # Positions in a chunk have 32 bits, so a chunk must have at most 2^32 entries.
        chunks = pool.chunks(n, _INLINE) + (n >> 32)
        self.ends = np.array([n * chunk // chunks for chunk in range(chunks + 1)])
        # Several times as many candidates as expected. Memory that is never written to is not
        # mapped, so the excess costs little.
        capacity = n if n <= _SMALL else min(n // chunks + 1, 8 * k + n // 32)
        shape = (chunks, capacity + 2 * _WORD)
        # Allocate with torch: NumPy requests huge pages, and the first candidate of each row would
        # map a whole one.
        self.keys: Array = torch.empty(shape, dtype=self.word).numpy()
        self.positions: Array = torch.empty(shape, dtype=torch.uint32).numpy()
        self.counts = np.empty(chunks, np.int64)
        self.histograms = np.empty((chunks, _BINS), np.uint32)
        word = self.keys.dtype.type
        self.limits = word((1 << 8 * self.keys.itemsize - 1) - 1), word(self.infinity)
        self.lowest: int | None = None
        self.spare = _TIGHT

    def select(self, x: Tensor, g: Tensor | None, e: Tensor | None) -> Tensor:
        """Return the indices of the k largest entries of `x`, ascending.

        Args:
            x: 1-D, contiguous.
            g: None, or with `e` two summands, contiguous and of dtypes in SUMS, to write their sum
                to `x` first.
            e: as `g`.
        """
        k, bits = self.k, x.view(self.word).numpy()
        first: Array | None = None
        second: Array | None = None
        if g is not None and e is not None:
            # Numba has no bfloat16, so pass its bits.
            first = (g.view(torch.uint16) if g.dtype == torch.bfloat16 else g).numpy()
            second = e.numpy()
        for sampling in (False, True) if self.lowest is not None else (True,):
            guess = self._sampled(first, second, bits) if sampling else self.lowest
            # NaN has larger bits than infinity but ranks equal: a larger bound would miss infinity.
            bound = min(guess or 0, self.infinity)
            total = self._collect(first, second, bits, bound)
            first = second = None  # `x` now contains the sum, even if the guess was bad
            if total >= k:
                found = self.keys, self.positions, self.ends, self.counts, self.histograms
                threshold, chosen = self._choose(bound, *found)
                self._lower(threshold, bound, total - k)
                return chosen
            if total >= 0:  # too few candidates: the bound was too high, so aim lower next time
                self.spare = min(2 * self.spare, _LOOSE)
        # Both guesses failed. The whole vector is one row of candidates.
        whole = bits[None], None, self.ends, np.array([self.n]), self.histograms
        _tally(bits, 0, self._shift(0), *self.limits, self.histograms[0])
        threshold, chosen = self._choose(0, *whole)
        self._lower(threshold, threshold, 0)
        return chosen

    def _collect(self, first: Any, second: Any, bits: Array, bound: int) -> int:
        """Collect the entries of magnitude `bound` or more, and return their number.

        Return -1 if they do not fit into the rows. `first` and `second` are the summands or None.
        """
        task = first, second, bits, bits.dtype.type(bound), self._shift(bound), *self.limits
        rows = self.ends, self.keys, self.positions, self.counts, self.histograms
        if self.counts.size == 1:
            _collect(*task, *rows, 0)
        else:
            pool.each(lambda chunk: _collect(*task, *rows, chunk), self.counts.size)
        counts = self.counts.tolist()
        return sum(counts) if min(counts) >= 0 else -1

    def _choose(
        self,
        bound: int,
        keys: Array,
        positions: Array | None,
        ends: Array,
        counts: Array,
        histograms: Array,
    ) -> tuple[int, Tensor]:
        """Return the bits of the k-th largest magnitude, and the indices of the k largest.

        The arrays are those of :class:`Candidates`. Without `positions`, a key's position is its
        position in the row. No key is smaller than `bound`.
        """
        chosen = torch.empty(self.k, dtype=torch.int64)
        offsets, ties = np.empty(counts.size + 1, np.int64), np.empty(counts.size, np.int64)
        found = keys, counts, histograms[: counts.size]
        split = bound, self._shift(bound), *self.limits
        threshold = _find_threshold(*found, *split, self.k, offsets, ties)
        task = keys, positions, ends, counts, threshold, *self.limits, offsets, ties, chosen.numpy()
        if counts.size == 1:
            _write(*task, 0)
        else:
            pool.each(lambda row: _write(*task, row), counts.size)
        return threshold, chosen

    def _shift(self, bound: int) -> int:
        """Return how many low bits of a key the first histogram ignores."""
        # The threshold is close above the bound. If there is no bound, it can be anywhere.
        top = min(bound + (_OCTAVES << self.mantissa), self.infinity) if bound else self.infinity
        return max((top - bound).bit_length() - _DIGIT, 0)

    def _sampled(self, first: Any, second: Any, bits: Array) -> int:
        """Guess the bound from a sample of the entries."""
        n, k = self.n, self.k
        if n <= _SMALL:
            return 0
        # A larger sample takes longer, and a smaller one gives a worse guess. This size is fastest
        # if drawing one entry costs four times as much as one excess candidate.
        count = min(n // 16, max(512, round((n * k / 4) ** (1 / 3))))
        expected = count * k / n
        # With this margin, fewer than about 1 in 10,000 samples give fewer than k candidates.
        rank = min(count, math.ceil(expected + 4 * math.sqrt(expected) + 4))
        return int(_sample(first, second, bits, *self.limits, count, rank))

    def _lower(self, threshold: int, bound: int, spare: int) -> None:
        """Set the bound for the next selection below this one's threshold.

        If the vector does not change, ``self.spare * k`` excess entries will pass the new bound.

        Args:
            threshold: bits of the k-th largest magnitude.
            bound: bits of the bound that this selection used.
            spare: number of entries between `bound` and `threshold`.
        """
        # The number of entries is assumed to grow exponentially with the bits below the threshold,
        # as for a power law.
        octave = 1 << self.mantissa
        step = octave // 16
        if spare:
            growth = math.log1p(spare / self.k)
            step = int((threshold - bound) * math.log1p(self.spare) / growth)
        # A bound that is too tight costs a second pass, one that is too loose costs time for each
        # candidate. In some trainings gradients change by a third from step to step, in others
        # hardly at all. The aim therefore doubles when a bound was too tight (see `select`),
        # and otherwise falls slowly.
        self.spare = max(0.98 * self.spare, _TIGHT)
        self.lowest = max(threshold - min(max(step, octave // 256), octave // 2), 0)


# --- Compiled -------------------------------------------------------------------------------------


def _passing(lanes: int) -> Any:
    """Make a Numba intrinsic that compares `lanes` entries with a bound, one bit per entry.

    The entries are ``bits[at : at + lanes]``. A bit is set if the entry's magnitude is at least
    `bound`. If there are summands `g` and `e`, their sum is first written to `bits`.
    """
    # A branch per entry would be mispredicted for nearly every entry that passes, because few do.
    # LLVM does not compile plain loops to such words. This takes a few instructions for 64 entries.
    # With plain loops, a whole encoding took 1.1 to 1.4 times as long for 1e5 entries and 1.3 to
    # 1.7 times for 1e6 (measured).

    def make(typing_context: Any, g: Any, e: Any, bits: Any, at: Any, mask: Any, bound: Any) -> Any:
        entries = ir.VectorType(ir.IntType(bits.dtype.bitwidth), lanes)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def vector(number: int) -> Any:
                array = context.make_array(signature.args[number])
                data = array(context, builder, args[number]).data
                lane = ir.VectorType(data.type.pointee, lanes)
                return builder.bitcast(builder.gep(data, [args[3]]), lane.as_pointer())

            # Tensors can start anywhere, so promise LLVM only the alignment of one element.
            def load(number: int) -> Any:
                align = signature.args[number].dtype.bitwidth // 8
                return builder.load(vector(number), align=align)

            def all_of(word: Any) -> Any:
                first = builder.insert_element(ir.Constant(entries, ir.Undefined), word, zero)
                return builder.shuffle_vector(first, first, ir.Constant(spread, [0] * lanes))

            zero, spread = ir.IntType(32)(0), ir.VectorType(ir.IntType(32), lanes)
            if g == types.none:
                found = load(2)
            else:
                first, second = load(0), load(1)
                # bfloat16 comes as 16-bit integers: they are the high half of a float32.
                if first.type.element == ir.IntType(16):
                    wide = builder.shl(
                        builder.zext(first, spread), ir.Constant(spread, [16] * lanes)
                    )
                    first = builder.bitcast(wide, second.type)
                found = builder.bitcast(builder.fadd(first, second), entries)
                builder.store(found, vector(2), align=bits.dtype.bitwidth // 8)
            unsigned = builder.and_(found, all_of(args[4]))
            passes = builder.icmp_unsigned(">=", unsigned, all_of(args[5]))
            return builder.zext(builder.bitcast(passes, ir.IntType(lanes)), ir.IntType(64))

        return types.uint64(g, e, bits, types.int64, mask, bound), generate

    return intrinsic(make)


_passing_all = _passing(_WORD)
_passing_one = _passing(1)


@kernel(inline="always")
def _passing_word(g: Any, e: Any, bits: Array, start: int, end: int, mask: Any, bound: Any) -> Any:
    """Compare up to 64 entries from `start` with the bound, one bit per entry; see `_passing`."""
    if start + _WORD <= end:
        return _passing_all(g, e, bits, start, mask, bound)
    # The last entries of a chunk, one by one: 64 would reach into the next chunk.
    word = np.uint64(0)
    for at in range(start, end):
        word |= _passing_one(g, e, bits, at, mask, bound) << np.uint64(at - start)
    return word


@kernel()
def _collect(
    g: Any,
    e: Any,
    bits: Array,
    bound: Any,
    shift: int,
    mask: Any,
    infinity: Any,
    ends: Array,
    keys: Array,
    positions: Array,
    counts: Array,
    histograms: Array,
    chunk: int,
) -> None:
    """Collect the entries of a chunk with magnitude `bound` (at most infinity) or more.

    If `g` and `e` are not None, first write their sum to the vector. `bits` are the bits of the
    whole vector, and a bfloat16 `g` is also passed as its bits. `mask` and `infinity` are the
    ``limits`` of :class:`Candidates`, which describes the other arrays as well.
    """
    key, position, begin, end = keys[chunk], positions[chunk], ends[chunk], ends[chunk + 1]
    count = 0
    for start in range(begin, end, _WORD):
        word = _passing_word(g, e, bits, start, end, mask, bound)
        if not word:
            continue
        if count + 2 * _WORD > key.size:
            # The row is full. Mark the overflow but continue: the rest must still be summed.
            count = 1 << 62
            continue
        at = np.uint64(count)
        count += ones(word)
        while word:
            # Several at once, even if fewer are left: this mispredicts fewer ends of the loop. The
            # next entries overwrite what this writes in excess.
            for step in range(np.uint64(_BURST)):
                i = np.uint64(start) + (np.uint64(trailing_zeros(word)) & np.uint64(_WORD - 1))
                word &= word - np.uint64(1)
                key[at + step] = min(bits[i] & mask, infinity)
                position[at + step] = i - np.uint64(begin)
            at += np.uint64(_BURST)
    counts[chunk] = count if count <= key.size else -1
    _tally(key[: max(counts[chunk], 0)], bound, shift, mask, infinity, histograms[chunk])


@kernel()
def _sample(g: Any, e: Any, bits: Array, mask: Any, infinity: Any, count: int, rank: int) -> Any:
    """Return the magnitude with this rank, from 1, in a sample of `count` entries."""
    keys: Array = np.empty(count, bits.dtype)
    width = bits.size / count
    for part in range(count):
        # One entry in each of `count` equal parts. Its place there is a hash, because equal steps
        # could coincide with a regular pattern in the vector.
        place = np.float64(part * 2654435761 & 0xFFFFFFFF) / 2.0**32
        at = min(int((part + place) * width), bits.size - 1)
        # For the sum, which it writes to `bits`.
        _passing_one(g, e, bits, at, mask, infinity)
        keys[part] = min(bits[at] & mask, infinity)
    return _kth_smallest(keys, np.uint64(0), np.uint64(infinity), count - rank)


@kernel()
def _magnitude(key: Any, mask: Any, infinity: Any) -> Any:
    return np.uint64(min(key & mask, infinity))


@kernel()
def _bin(key: Any, low: Any, shift: Any, mask: Any, infinity: Any) -> Any:
    """Return the bin of a key that is at least `low`. The last bin takes all larger keys."""
    magnitude = _magnitude(key, mask, infinity)
    return min((magnitude - np.uint64(low)) >> np.uint64(shift), np.uint64(_BINS - 1))


@kernel()
def _tally(keys: Array, low: int, shift: int, mask: Any, infinity: Any, histogram: Array) -> None:
    """Count the keys in each bin."""
    histogram[:] = 0
    for i in range(keys.size):
        histogram[_bin(keys[i], low, shift, mask, infinity)] += np.uint32(1)


@kernel()
def _kth_smallest(keys: Array, low: Any, high: Any, k: int) -> Any:
    """Return ``sorted(keys)[k]``. All keys are in [low, high]."""
    shift, size = np.uint64(0), np.uint64(_BINS)
    while (high - low) >> shift >= size:
        shift += np.uint64(1)
    histogram = np.empty(_BINS, np.uint32)
    while True:
        histogram[:] = 0
        for i in range(keys.size):
            at = (np.uint64(keys[i]) - low) >> shift
            if at < size:
                histogram[at] += np.uint32(1)
        digit = 0
        while histogram[digit] <= k:
            k -= histogram[digit]
            digit += 1
        # Continue within the bin that contains the key.
        low += np.uint64(digit) << shift
        if shift == 0:
            return low
        shift = shift - np.uint64(_DIGIT) if shift > _DIGIT else np.uint64(0)


@kernel()
def _find_threshold(
    keys: Array,
    counts: Array,
    histograms: Array,
    bound: int,
    shift: int,
    mask: Any,
    infinity: Any,
    k: int,
    offsets: Array,
    ties: Array,
) -> Any:
    """Return the k-th largest magnitude, and share out what is chosen among the rows.

    `keys`, `counts` and `histograms` are those of :class:`Candidates`, with the first bin at
    `bound`. Write to `offsets` how many chosen keys are before each row, and after the last. Write
    to `ties` how many keys of each row are chosen that equal the threshold.
    """
    digit, size, below = _bin_of_rank(histograms, counts.sum() - k)
    low = np.uint64(bound) + (np.uint64(digit) << np.uint64(shift))
    high = low + (np.uint64(1) << np.uint64(shift))
    if digit == _BINS - 1 or high > np.uint64(infinity):  # NaN is above infinity
        high = np.uint64(0)
    members, stops = _members(keys, counts, low, high, mask, infinity, size)
    top = high - np.uint64(1) if high else np.uint64(infinity)
    threshold = _kth_smallest(members, low, top, below)
    start, room = 0, k
    for row in range(counts.size):
        ties[row], offsets[row + 1] = 0, counts[row]
        for i in range(digit + 1):
            offsets[row + 1] -= np.int64(histograms[row, i])
        for i in range(start, stops[row]):
            ties[row] += members[i] == threshold
            offsets[row + 1] += members[i] > threshold
        start = stops[row]
        room -= offsets[row + 1]
    # Rows ascend in position, so ties are taken from the first row on.
    offsets[0] = 0
    for row in range(counts.size):
        ties[row] = min(ties[row], room)
        room -= ties[row]
        offsets[row + 1] += offsets[row] + ties[row]
    return threshold


@kernel()
def _bin_of_rank(histograms: Array, k: int) -> Any:
    """Return the bin of ``sorted(keys)[k]``, how many keys it has, and its rank among these."""
    digit = 0
    while True:
        size = histograms[:, digit].sum()
        if size > k:
            return digit, size, k
        k -= size
        digit += 1


@kernel()
def _members(
    keys: Array, counts: Array, low: Any, high: Any, mask: Any, infinity: Any, size: int
) -> Any:
    """Return the `size` magnitudes in [low, high), row by row, and where each row's end.

    If `high` is 0, there is no upper limit.
    """
    members: Array = np.empty(size, keys.dtype)
    stops, at, bits = np.empty(counts.size, np.int64), 0, keys.dtype.type
    for row in range(counts.size):
        key, count = keys[row], counts[row]
        for start in range(0, count, _WORD):
            word = _passing_word(None, None, key, start, count, mask, bits(low))
            if high:
                word &= ~_passing_word(None, None, key, start, count, mask, bits(high))
            while word:
                i = np.uint64(start) + np.uint64(trailing_zeros(word))
                word &= word - np.uint64(1)
                members[at] = min(key[i] & mask, infinity)
                at += 1
        stops[row] = at
    return members, stops


@kernel()
def _write(
    keys: Array,
    positions: Any,
    ends: Array,
    counts: Array,
    threshold: Any,
    mask: Any,
    infinity: Any,
    offsets: Array,
    ties: Array,
    chosen: Array,
    row: int,
) -> None:
    """Write the indices of a row's keys above the threshold, and of its first ones equal to it."""
    key, count, begin = keys[row], np.uint64(counts[row]), ends[row]
    at, stop, limit = np.uint64(offsets[row]), np.uint64(offsets[row + 1]), np.uint64(threshold)
    # Each key is written, and overwritten if it is not chosen. A branch would be mispredicted.
    first, room = np.uint64(0), ties[row]
    while room > 0 and first < count:
        magnitude = _magnitude(key[first], mask, infinity)
        chosen[at] = begin + np.int64(first if positions is None else positions[row, first])
        at += np.uint64(magnitude >= limit)
        room -= magnitude == limit
        first += np.uint64(1)
    for i in range(first, count):
        if at == stop:
            break
        chosen[at] = begin + np.int64(i if positions is None else positions[row, i])
        at += np.uint64(_magnitude(key[i], mask, infinity) > limit)
