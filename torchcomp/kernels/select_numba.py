"""Selection in Numba, for the CPU: near the memory floor, and exact.

A selection

1. guesses a lower bound of the k-th largest magnitude, from the last selection or from a sample;
2. collects, in one pass, the entries that are not below the guess: the candidates. The pass goes
   by chunks of the vector, and adds the summands on the way;
3. finds the k-th largest magnitude among the candidates by radix, twelve bits a round;
4. writes out the candidates above it and, from the lowest index on, those equal to it.

After a guess that gives too few candidates, or too many, comes another, and then steps 3 and 4
with the whole vector. So the guess decides how long it takes, and never the result.

Magnitudes are compared by their bits, which order as the numbers do; NaN counts as infinite.
"""

import math
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from torchcomp.kernels import pool
from torchcomp.kernels.elias_fano_numba import trailing_zeros
from torchcomp.kernels.select import Scratch

Array = NDArray[Any]
Summands = tuple[Tensor, Tensor] | None

_SMALL = 1 << 14
"""Up to this many entries a sample does not pay: all are candidates."""

_INLINE = 1 << 20
"""As :data:`.pool.INLINE`, for a pass that does less work for each entry."""

_TIGHT, _LOOSE = 0.25, 2.0
"""How many more candidates than wanted a guess aims at, in units of k: at least and at most."""

_WORD = 64
"""Entries that are compared at once: a bit each of one integer."""

_DIGIT = 12
"""Bits of a magnitude that a histogram tells apart."""

_FORMATS = {
    torch.float16: (torch.uint16, 10, 0x7C00),
    torch.bfloat16: (torch.uint16, 7, 0x7F80),
    torch.float32: (torch.uint32, 23, 0x7F800000),
    torch.float64: (torch.uint64, 52, 0x7FF0000000000000),
}
"""Of a dtype: its bits as integers, how many of them are below the exponent, and infinity's."""

DTYPES = tuple(_FORMATS)
LIMIT = 1 << 62
SUMS = (
    (torch.float32, torch.float32, torch.float32),
    (torch.bfloat16, torch.float32, torch.float32),
    (torch.float64, torch.float64, torch.float64),
)
"""The dtypes of two summands and their sum that are added here."""


def select(x: Tensor, k: int, scratch: Scratch, summands: Summands) -> Tensor:
    """The indices of the `k` largest entries of `x`, which the summands are added into before."""
    kept = scratch.kept
    if not isinstance(kept, Candidates) or kept.made_for != (x.numel(), k, x.dtype):
        kept = scratch.kept = Candidates(x.numel(), k, x.dtype)
    return kept.select(x, summands)


class Candidates:
    """The candidates of a vector, and the bound to collect the next ones by.

    Memory that no candidate comes to is never touched, so every chunk has several times as much as
    is expected to be needed, and it costs little.

    Attributes:
        made_for: length of the vector, entries to select, dtype.
        ends: where the chunks begin and end.
        keys: magnitudes of candidates as bits, a row for each chunk.
        places: where in their chunk they are.
        counts: number of candidates in each chunk; -1 if the row was too short.
        limits: what of a word is not the sign, and infinity, as words.
        lowest: bits of the bound for the next selection; None at the start.
        spare: how many more candidates than wanted the bound aims at, in units of k.
    """

    def __init__(self, n: int, k: int, dtype: torch.dtype) -> None:
        self.made_for = (n, k, dtype)
        self.word, self.mantissa, self.infinity = _FORMATS[dtype]
        # Places in a chunk have 32 bits.
        chunks = pool.chunks(n, _INLINE) + (n >> 32)
        self.ends = np.array([n * chunk // chunks for chunk in range(chunks + 1)])
        capacity = n if n <= _SMALL else min(n // chunks + 1, 8 * k + n // 32)
        shape = (chunks, capacity + _WORD)
        # By torch: NumPy asks for huge pages, of which a row's first candidate would fill one.
        self.keys: Array = torch.empty(shape, dtype=self.word).numpy()
        self.places: Array = torch.empty(shape, dtype=torch.uint32).numpy()
        self.counts = np.zeros(chunks, np.int64)
        word = self.keys.dtype.type
        self.limits = word(np.iinfo(word).max >> 1), word(self.infinity)
        self.lowest: int | None = None
        self.spare = _TIGHT

    def select(self, x: Tensor, summands: Summands) -> Tensor:
        """The indices of the largest entries of `x`, which the summands are added into before."""
        n, k, _ = self.made_for
        bits: Array = x.view(self.word).numpy()
        result = torch.empty(k, dtype=torch.int64)
        for sampling in (False, True) if self.lowest is not None else (True,):
            guess = self._sampled(x, summands) if sampling else self.lowest
            # Above infinity, it would pass over infinities, which rank with NaN.
            bound = min(guess or 0, self.infinity)
            total = self._collect(bits, summands, bound)
            summands = None  # They are added, even if the guess was bad.
            if total >= k:
                found = self.keys, self.places, self.counts, self.ends
                threshold = _choose(*found, bound, *self.limits, result.numpy())
                self._lower(threshold, bound, total - k)
                return result
            if total >= 0:
                self.spare = min(2 * self.spare, _LOOSE)
        whole = bits[None], None, np.array([n]), self.ends
        threshold = _choose(*whole, 0, *self.limits, result.numpy())
        self._lower(threshold, threshold, 0)
        return result

    def _collect(self, bits: Array, summands: Summands, bound: int) -> int:
        """Collects the entries from `bound` on; gives their number, -1 if they do not fit."""
        first = second = None
        if summands is not None:
            g, e = summands
            # Numba knows no bfloat16: it goes by its bits.
            first = (g.view(torch.uint16) if g.dtype == torch.bfloat16 else g).numpy()
            second = e.numpy()
        task = first, second, bits, bits.dtype.type(bound), *self.limits
        rows = self.ends, self.keys, self.places, self.counts
        pool.each(lambda chunk: _collect(*task, *rows, chunk), self.counts.size)
        return int(self.counts.sum()) if self.counts.min() >= 0 else -1

    def _sampled(self, x: Tensor, summands: Summands) -> int:
        n, k, dtype = self.made_for
        if n <= _SMALL:
            return 0
        # A larger sample takes longer, a smaller one guesses worse. This size takes least time if
        # drawing one entry costs four times as much as a candidate too many.
        count = min(n // 16, max(512, round((n * k / 4) ** (1 / 3))))
        at = torch.from_numpy(_places(n, count))
        sample = x[at] if summands is None else (summands[0][at] + summands[1][at]).to(dtype)
        magnitudes: Array = sample.abs_().view(self.word).numpy()
        expected = count * k / n
        # With this many more, hardly one sample in ten thousand gives fewer than k candidates.
        rank = min(count, math.ceil(1.1 * expected + 4 * math.sqrt(expected) + 4))
        return int(np.partition(magnitudes, -rank)[-rank])

    def _lower(self, threshold: int, bound: int, spare: int) -> None:
        """Sets a bound that should let ``spare * k`` more entries pass, if nothing changes.

        Between the last bound and the threshold were `spare` entries; their number is taken to grow
        exponentially with the bits below the threshold, as it does for a power law. Too tight a
        bound costs a second pass, too loose a one time for each candidate. Gradients of some
        trainings change by a third from step to step and those of others hardly at all, so the aim
        doubles when a bound was too tight, and otherwise falls slowly.
        """
        octave = 1 << self.mantissa
        step = octave // 16
        if spare:
            growth = math.log1p(spare / self.made_for[1])
            step = int((threshold - bound) * math.log1p(self.spare) / growth)
        self.spare = max(0.98 * self.spare, _TIGHT)
        self.lowest = max(threshold - min(max(step, octave // 256), octave // 2), 0)


def _places(n: int, count: int) -> Array:
    """One place in each of `count` equal parts; by a hash, lest a pattern in the vector fits."""
    part = np.arange(count)
    return part * n // count + (part * 2654435761 >> 8) % (n // count)


# --- Compiled -------------------------------------------------------------------------------------


def _passing(lanes: int) -> Any:
    """For Numba: which of `lanes` entries have a magnitude of at least a bound, a bit each.

    The entries are those of `bits` from `at` on. If there are summands, these are added into it
    before. Few entries pass, so a branch for each would be mispredicted for each; and LLVM makes no
    such words of plain loops. This takes a few instructions for 64; with plain loops a whole
    encoding took 1.1 to 1.4 times as long for 1e5 entries and 1.3 to 1.7 for 1e6 (measured).
    """

    def make(typing_context: Any, g: Any, e: Any, bits: Any, at: Any, mask: Any, bound: Any) -> Any:
        entries = ir.VectorType(ir.IntType(bits.dtype.bitwidth), lanes)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def vector(number: int) -> Any:
                array = context.make_array(signature.args[number])
                data = array(context, builder, args[number]).data
                lane = ir.VectorType(data.type.pointee, lanes)
                return builder.bitcast(builder.gep(data, [args[3]]), lane.as_pointer())

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
                if first.type.element == ir.IntType(16):  # bfloat16: Numba knows its bits alone
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


@njit(nogil=True, cache=True)
def _collect(
    g: Any,
    e: Any,
    bits: Array,
    bound: Any,
    mask: Any,
    infinity: Any,
    ends: Array,
    keys: Array,
    places: Array,
    counts: Array,
    chunk: int,
) -> None:
    """Collect the entries of a chunk of magnitude `bound` (at most infinity) or more.

    `g` and `e`, which may be None, are added into the vector of `bits` before; of a bfloat16 `g`
    these are the bits. `mask` takes the sign off. The rest is as in :class:`Candidates`.
    """
    key, place, begin, end = keys[chunk], places[chunk], ends[chunk], ends[chunk + 1]
    count = 0
    for start in range(begin, end, _WORD):
        word = np.uint64(0)
        if start + _WORD <= end:
            word = _passing_all(g, e, bits, start, mask, bound)
        else:
            for at in range(start, end):
                passes = _passing_one(g, e, bits, at, mask, bound)
                word |= passes << np.uint64(at - start)
        if word and count + _WORD > key.size:
            count = 1 << 62  # They do not fit; but all is yet to be added.
            word = np.uint64(0)
        while word:
            i = start + np.int64(trailing_zeros(word))
            word &= word - np.uint64(1)
            key[count] = min(bits[i] & mask, infinity)
            place[count] = i - begin
            count += 1
    counts[chunk] = count if count <= key.size else -1


@njit(nogil=True, cache=True)
def _magnitude(bits: Any, mask: Any, infinity: Any) -> Any:
    return np.uint64(min(bits & mask, infinity))


@njit(nogil=True, cache=True)
def _choose(
    keys: Array,
    places: Any,
    counts: Array,
    starts: Array,
    bound: int,
    mask: Any,
    infinity: Any,
    chosen: Array,
) -> Any:
    """Write the indices of the largest of the keys; returns the smallest magnitude of these.

    `keys`, `places` and `counts` are as in :class:`Candidates`, whose chunks begin at `starts`;
    with None for `places` a key's place is that in its row. No key is below `bound`.
    """
    top, rows = np.uint64(0), counts.size
    for row in range(rows):
        for i in range(counts[row]):
            top = max(top, _magnitude(keys[row, i], mask, infinity))
    low, shift, size = np.uint64(bound), np.uint64(0), np.uint64(1 << _DIGIT)
    while (top - low) >> shift >= size:
        shift += np.uint64(1)
    histogram = np.empty(1 << _DIGIT, np.int64)
    below, digit = counts.sum() - chosen.size, 0  # keys that are not chosen
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
        low += np.uint64(digit) << shift
        if shift == 0:
            break
        shift = shift - np.uint64(_DIGIT) if shift > _DIGIT else np.uint64(0)
    ties, at = histogram[digit] - below, 0
    for row in range(rows):
        for i in range(counts[row]):
            if at == chosen.size:
                break
            key = _magnitude(keys[row, i], mask, infinity)
            tied = key == low and ties > 0
            chosen[at] = starts[row] + (i if places is None else places[row, i])
            at += key > low or tied
            ties -= tied
    return low
