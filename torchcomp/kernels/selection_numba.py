"""Compiled passes over the entries and the candidates of a selection; see :mod:`.select_numba`."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from torchcomp.kernels.elias_fano_numba import ones, trailing_zeros
from torchcomp.kernels.numba_jit import kernel

Array = NDArray[Any]

WORD = 64
"""Number of entries that are compared together. Each sets one bit of a 64-bit integer."""

_BURST = 4
"""Number of candidates that are stored without a branch in between."""

DIGIT = 12
"""Bits of a magnitude per round of the radix search: a histogram has 2^12 bins."""

BINS = 1 << DIGIT


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


_passing_all = _passing(WORD)
_passing_one = _passing(1)


@kernel(inline="always")
def _passing_word(g: Any, e: Any, bits: Array, start: int, end: int, mask: Any, bound: Any) -> Any:
    """Compare up to 64 entries from `start` with the bound, one bit per entry; see `_passing`."""
    if start + WORD <= end:
        return _passing_all(g, e, bits, start, mask, bound)
    # The last entries of a chunk, one by one: 64 would reach into the next chunk.
    word = np.uint64(0)
    for at in range(start, end):
        word |= _passing_one(g, e, bits, at, mask, bound) << np.uint64(at - start)
    return word


@kernel()
def collect(
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
    ``limits`` of :class:`.select_numba.Candidates`, which describes the other arrays as well.
    """
    key, position, begin, end = keys[chunk], positions[chunk], ends[chunk], ends[chunk + 1]
    count = 0
    for start in range(begin, end, WORD):
        word = _passing_word(g, e, bits, start, end, mask, bound)
        if not word:
            continue
        if count + 2 * WORD > key.size:
            # The row is full. Mark the overflow but continue: the rest must still be summed.
            count = 1 << 62
            continue
        at = np.uint64(count)
        count += ones(word)
        while word:
            # Several at once, even if fewer are left: this mispredicts fewer ends of the loop. The
            # next entries overwrite what this writes in excess.
            for step in range(np.uint64(_BURST)):
                i = np.uint64(start) + (np.uint64(trailing_zeros(word)) & np.uint64(WORD - 1))
                word &= word - np.uint64(1)
                key[at + step] = min(bits[i] & mask, infinity)
                position[at + step] = i - np.uint64(begin)
            at += np.uint64(_BURST)
    counts[chunk] = count if count <= key.size else -1
    tally(key[: max(counts[chunk], 0)], bound, shift, mask, infinity, histograms[chunk])


@kernel()
def sample(g: Any, e: Any, bits: Array, mask: Any, infinity: Any, count: int, rank: int) -> Any:
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
    return min((magnitude - np.uint64(low)) >> np.uint64(shift), np.uint64(BINS - 1))


@kernel()
def tally(keys: Array, low: int, shift: int, mask: Any, infinity: Any, histogram: Array) -> None:
    """Count the keys in each bin."""
    histogram[:] = 0
    for i in range(keys.size):
        histogram[_bin(keys[i], low, shift, mask, infinity)] += np.uint32(1)


@kernel()
def _kth_smallest(keys: Array, low: Any, high: Any, k: int) -> Any:
    """Return ``sorted(keys)[k]``. All keys are in [low, high]."""
    shift, size = np.uint64(0), np.uint64(BINS)
    while (high - low) >> shift >= size:
        shift += np.uint64(1)
    histogram = np.empty(BINS, np.uint32)
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
        shift = shift - np.uint64(DIGIT) if shift > DIGIT else np.uint64(0)


@kernel()
def find_threshold(
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

    `keys`, `counts` and `histograms` are those of :class:`.select_numba.Candidates`, with the first
    bin at `bound`. Write to `offsets` how many chosen keys are before each row, and after the last.
    Write to `ties` how many keys of each row are chosen that equal the threshold.
    """
    digit, size, below = _bin_of_rank(histograms, counts.sum() - k)
    low = np.uint64(bound) + (np.uint64(digit) << np.uint64(shift))
    high = low + (np.uint64(1) << np.uint64(shift))
    if digit == BINS - 1 or high > np.uint64(infinity):  # NaN is above infinity
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
        for start in range(0, count, WORD):
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
def write(
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
