"""Exact selection in Numba, for the CPU. It takes little more than one pass over the memory.

A selection

1. guesses a lower bound of the k-th largest magnitude, from the last selection or from a sample;
2. collects the candidates in one pass: the entries whose magnitude is not below the guess. The pass
   splits the vector into chunks, and adds the summands if there are any;
3. finds the k-th largest magnitude among the candidates with a radix search, 12 bits per round;
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
from torchcomp.kernels.elias_fano_numba import trailing_zeros
from torchcomp.kernels.numba_jit import kernel
from torchcomp.kernels.select import Scratch

Array = NDArray[Any]
Summands = tuple[Tensor, Tensor] | None

_SMALL = 1 << 14
"""Up to this many entries, all entries are candidates: drawing a sample would take longer."""

_INLINE = 1 << 20
"""Like :data:`.pool.INLINE`, but for a pass that does less work per entry."""

_TIGHT, _LOOSE = 0.25, 2.0
"""Minimum and maximum number of excess candidates that a guess aims at, in units of k."""

_WORD = 64
"""Number of entries that are compared together. Each sets one bit of a 64-bit integer."""

_DIGIT = 12
"""Bits of a magnitude per round of the radix search: a histogram has 2^12 bins."""

_FORMATS = {
    torch.float16: (torch.uint16, 10, 0x7C00),
    torch.bfloat16: (torch.uint16, 7, 0x7F80),
    torch.float32: (torch.uint32, 23, 0x7F800000),
    torch.float64: (torch.uint64, 52, 0x7FF0000000000000),
}
"""For each dtype: the integer dtype of its bits, the mantissa's width, and the bits of infinity."""

DTYPES = tuple(_FORMATS)
LIMIT = 1 << 62
SUMS = (
    (torch.float32, torch.float32, torch.float32),
    (torch.bfloat16, torch.float32, torch.float32),
    (torch.float64, torch.float64, torch.float64),
)
"""Supported dtypes of two summands and their sum."""


def select(x: Tensor, k: int, scratch: Scratch, summands: Summands) -> Tensor:
    """Return the indices of the `k` largest entries of `x`.

    If `summands` is not None, first write their sum to `x`.
    """
    kept = scratch.kept
    # The scratch can come from another form, or from a vector of another length or dtype.
    if not isinstance(kept, Candidates) or kept.made_for != (x.numel(), k, x.dtype):
        kept = scratch.kept = Candidates(x.numel(), k, x.dtype)
    return kept.select(x, summands)


class Candidates:
    """The candidates of a vector, and the bound for collecting the next ones.

    Attributes:
        made_for: length of the vector, number of entries to select, dtype.
        ends: offsets of the chunks: chunk i spans ``ends[i]`` to ``ends[i + 1]``.
        keys: magnitudes of the candidates as bits, one row per chunk.
        positions: positions of the candidates in their chunk, shaped like `keys`.
        counts: number of candidates of each chunk; -1 if its row was too short.
        limits: a mask of all bits except the sign, and the bits of infinity.
        lowest: bits of the bound for the next selection; None at the start.
        spare: number of excess candidates that the bound aims at, in units of k.
    """

    def __init__(self, n: int, k: int, dtype: torch.dtype) -> None:
        self.made_for = (n, k, dtype)
        self.word, self.mantissa, self.infinity = _FORMATS[dtype]
        # Positions in a chunk have 32 bits, so a chunk must have at most 2^32 entries.
        chunks = pool.chunks(n, _INLINE) + (n >> 32)
        self.ends = np.array([n * chunk // chunks for chunk in range(chunks + 1)])
        # Several times as many candidates as expected. Memory that is never written to is not
        # mapped, so the excess costs little.
        capacity = n if n <= _SMALL else min(n // chunks + 1, 8 * k + n // 32)
        shape = (chunks, capacity + _WORD)
        # Allocate with torch: NumPy requests huge pages, and the first candidate of each row would
        # map a whole one.
        self.keys: Array = torch.empty(shape, dtype=self.word).numpy()
        self.positions: Array = torch.empty(shape, dtype=torch.uint32).numpy()
        self.counts = np.zeros(chunks, np.int64)
        word = self.keys.dtype.type
        self.limits = word(np.iinfo(word).max >> 1), word(self.infinity)
        self.lowest: int | None = None
        self.spare = _TIGHT

    def select(self, x: Tensor, summands: Summands) -> Tensor:
        """Return the indices of the largest entries of `x`; see :func:`select`."""
        n, k, _ = self.made_for
        bits: Array = x.view(self.word).numpy()
        result = torch.empty(k, dtype=torch.int64)
        for sampling in (False, True) if self.lowest is not None else (True,):
            guess = self._sampled(x, summands) if sampling else self.lowest
            # NaN has larger bits than infinity but ranks equal: a larger bound would miss infinity.
            bound = min(guess or 0, self.infinity)
            total = self._collect(bits, summands, bound)
            summands = None  # `x` now contains the sum, even if the guess was bad
            if total >= k:
                found = self.keys, self.positions, self.counts, self.ends
                threshold = _choose(*found, bound, *self.limits, result.numpy())
                self._lower(threshold, bound, total - k)
                return result
            if total >= 0:  # too few candidates: the bound was too high, so aim lower next time
                self.spare = min(2 * self.spare, _LOOSE)
        # Both guesses failed. The whole vector is one row of candidates.
        whole = bits[None], None, np.array([n]), self.ends
        threshold = _choose(*whole, 0, *self.limits, result.numpy())
        self._lower(threshold, threshold, 0)
        return result

    def _collect(self, bits: Array, summands: Summands, bound: int) -> int:
        """Collect the entries of magnitude `bound` or more, and return their number.

        Return -1 if they do not fit into the rows.
        """
        first = second = None
        if summands is not None:
            g, e = summands
            # Numba has no bfloat16, so pass its bits.
            first = (g.view(torch.uint16) if g.dtype == torch.bfloat16 else g).numpy()
            second = e.numpy()
        task = first, second, bits, bits.dtype.type(bound), *self.limits
        rows = self.ends, self.keys, self.positions, self.counts
        pool.each(lambda chunk: _collect(*task, *rows, chunk), self.counts.size)
        return int(self.counts.sum()) if self.counts.min() >= 0 else -1

    def _sampled(self, x: Tensor, summands: Summands) -> int:
        """Guess the bound from a sample of the entries."""
        n, k, dtype = self.made_for
        if n <= _SMALL:
            return 0
        # A larger sample takes longer, and a smaller one gives a worse guess. This size is fastest
        # if drawing one entry costs four times as much as one excess candidate.
        count = min(n // 16, max(512, round((n * k / 4) ** (1 / 3))))
        at = torch.from_numpy(_sample_positions(n, count))
        sample = x[at] if summands is None else (summands[0][at] + summands[1][at]).to(dtype)
        magnitudes: Array = sample.abs_().view(self.word).numpy()
        expected = count * k / n
        # With this margin, fewer than about 1 in 10,000 samples give fewer than k candidates.
        rank = min(count, math.ceil(1.1 * expected + 4 * math.sqrt(expected) + 4))
        return int(np.partition(magnitudes, -rank)[-rank])

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
            growth = math.log1p(spare / self.made_for[1])
            step = int((threshold - bound) * math.log1p(self.spare) / growth)
        # A bound that is too tight costs a second pass, one that is too loose costs time for each
        # candidate. In some trainings gradients change by a third from step to step, in others
        # hardly at all. The aim therefore doubles when a bound was too tight (see `select`),
        # and otherwise falls slowly.
        self.spare = max(0.98 * self.spare, _TIGHT)
        self.lowest = max(threshold - min(max(step, octave // 256), octave // 2), 0)


def _sample_positions(n: int, count: int) -> Array:
    """Return one position in each of `count` equal parts of n entries."""
    # A hash, because equal steps could coincide with a regular pattern in the vector.
    part = np.arange(count)
    return part * n // count + (part * 2654435761 >> 8) % (n // count)


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


@kernel()
def _collect(
    g: Any,
    e: Any,
    bits: Array,
    bound: Any,
    mask: Any,
    infinity: Any,
    ends: Array,
    keys: Array,
    positions: Array,
    counts: Array,
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
        word = np.uint64(0)
        if start + _WORD <= end:
            word = _passing_all(g, e, bits, start, mask, bound)
        else:
            # The last entries of a chunk, one by one: 64 would reach into the next chunk.
            for at in range(start, end):
                passes = _passing_one(g, e, bits, at, mask, bound)
                word |= passes << np.uint64(at - start)
        if word and count + _WORD > key.size:
            # The row is full. Mark the overflow but continue: the rest must still be summed.
            count = 1 << 62
            word = np.uint64(0)
        while word:
            i = start + np.int64(trailing_zeros(word))
            word &= word - np.uint64(1)
            key[count] = min(bits[i] & mask, infinity)
            position[count] = i - begin
            count += 1
    counts[chunk] = count if count <= key.size else -1


@kernel()
def _magnitude(bits: Any, mask: Any, infinity: Any) -> Any:
    return np.uint64(min(bits & mask, infinity))


@kernel()
def _choose(
    keys: Array,
    positions: Any,
    counts: Array,
    starts: Array,
    bound: int,
    mask: Any,
    infinity: Any,
    chosen: Array,
) -> Any:
    """Write the indices of the largest keys to `chosen`, and return their smallest magnitude.

    `keys`, `positions` and `counts` are those of :class:`Candidates`, `mask` and `infinity` its
    ``limits``. Without `positions`, a key's position is its position in the row. `starts` are the
    offsets of the chunks. No key is smaller than `bound`. The length of `chosen` is the number of
    keys to choose.
    """
    top, rows = np.uint64(0), counts.size
    for row in range(rows):
        for i in range(counts[row]):
            top = max(top, _magnitude(keys[row, i], mask, infinity))
    # Keys lie in [low, top]. Start with the smallest shift at which they fit into one histogram.
    low, shift, size = np.uint64(bound), np.uint64(0), np.uint64(1 << _DIGIT)
    while (top - low) >> shift >= size:
        shift += np.uint64(1)
    histogram = np.empty(1 << _DIGIT, np.int64)
    below, digit = counts.sum() - chosen.size, 0  # number of keys that are not chosen
    while True:
        histogram[:] = 0
        for row in range(rows):
            for i in range(counts[row]):
                at = (_magnitude(keys[row, i], mask, infinity) - low) >> shift
                if at < size:
                    histogram[at] += 1
        digit = 0
        while histogram[digit] <= below:
            below -= histogram[digit]
            digit += 1
        # Continue within the bin that contains the threshold.
        low += np.uint64(digit) << shift
        if shift == 0:
            break
        shift = shift - np.uint64(_DIGIT) if shift > _DIGIT else np.uint64(0)
    # `low` is now the exact threshold. Rows and their keys ascend in position, so ties are taken
    # from the lowest index on.
    ties, at = histogram[digit] - below, 0
    for row in range(rows):
        for i in range(counts[row]):
            if at == chosen.size:
                break
            key = _magnitude(keys[row, i], mask, infinity)
            tied = key == low and ties > 0
            chosen[at] = starts[row] + (i if positions is None else positions[row, i])
            at += key > low or tied
            ties -= tied
    return low
