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

Magnitudes are compared by their bits, which have the same order. NaN counts as infinity. The passes
are compiled in :mod:`.selection_numba`.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcomp.kernels import pool
from torchcomp.kernels import selection_numba as selection
from torchcomp.kernels.selection_numba import BINS, DIGIT, WORD, Array

_SMALL = 1 << 14
"""Up to this many entries, all entries are candidates: drawing a sample would take longer."""

_INLINE = 1 << 20
"""Like :data:`.pool.INLINE`, but for a pass that does less work per entry."""

_TIGHT, _LOOSE = 0.25, 2.0
"""Minimum and maximum number of excess candidates that a guess aims at, in units of k."""

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
        shape = (chunks, capacity + 2 * WORD)
        # Allocate with torch: NumPy requests huge pages, and the first candidate of each row would
        # map a whole one.
        self.keys: Array = torch.empty(shape, dtype=self.word).numpy()
        self.positions: Array = torch.empty(shape, dtype=torch.uint32).numpy()
        self.counts = np.empty(chunks, np.int64)
        self.histograms = np.empty((chunks, BINS), np.uint32)
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
        selection.tally(bits, 0, self._shift(0), *self.limits, self.histograms[0])
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
            selection.collect(*task, *rows, 0)
        else:
            pool.each(lambda chunk: selection.collect(*task, *rows, chunk), self.counts.size)
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
        threshold = selection.find_threshold(*found, *split, self.k, offsets, ties)
        task = keys, positions, ends, counts, threshold, *self.limits, offsets, ties, chosen.numpy()
        if counts.size == 1:
            selection.write(*task, 0)
        else:
            pool.each(lambda row: selection.write(*task, row), counts.size)
        return threshold, chosen

    def _shift(self, bound: int) -> int:
        """Return how many low bits of a key the first histogram ignores."""
        # The threshold is close above the bound. If there is no bound, it can be anywhere.
        top = min(bound + (_OCTAVES << self.mantissa), self.infinity) if bound else self.infinity
        return max((top - bound).bit_length() - DIGIT, 0)

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
        return int(selection.sample(first, second, bits, *self.limits, count, rank))

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
