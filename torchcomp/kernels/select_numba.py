"""Exact selection in Numba, for the CPU. It takes little more than one pass over the memory.

The pass adds the summands, and collects as candidates the entries above a lower bound of the k-th
largest magnitude: that of the last step, lowered by a margin, or else one from a sample. NumPy
finds the k-th largest candidate, or all of them if both fail: a bound never changes the result.
Magnitudes are compared by their bits, which have the same order. NaN counts as infinity.
"""

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcomp.kernels import pool, select
from torchcomp.kernels.elias_fano_numba import ones, trailing_zeros
from torchcomp.kernels.numba_jit import kernel
from torchcomp.kernels.segments import Segment

Array = NDArray[Any]

_SMALL = 1 << 14
"""Up to this many entries, all entries are candidates: drawing a sample would take longer."""

_INLINE = 1 << 20
"""Like :data:`.pool.INLINE`, but for a pass that does less work per entry."""

_BLOCK = 256
"""Number of entries that are added, and then compared with the bound, while they are in a cache."""

_WORD = 64
"""Number of entries that are compared together. Each sets one bit of a 64-bit integer."""

_FORMATS = {
    torch.float16: (torch.uint16, 0x7C00),
    torch.bfloat16: (torch.uint16, 0x7F80),
    torch.float32: (torch.uint32, 0x7F800000),
    torch.float64: (torch.uint64, 0x7FF0000000000000),
}
"""For each dtype: the integer dtype of its bits, and the bits of infinity."""


class Candidates:
    """Memory for the candidates of a vector, and the bound of its next selection, for one thread.

    Chunk i spans ``ends[i]`` to ``ends[i + 1]``. `keys` and `positions` have a row for each chunk,
    and `counts` the number of its candidates; -1 if the row was too short.
    """

    def __init__(self, n: int, k: int, dtype: torch.dtype) -> None:
        self.n, self.k, self.dtype = n, k, dtype
        self.word, self.infinity = _FORMATS[dtype]
        chunks = pool.chunks(n, _INLINE)
        self.ends = np.array([n * chunk // chunks for chunk in range(chunks + 1)])
        # Several times as many candidates as expected. Memory that is never written to is not
        # mapped, so the excess costs little. NumPy would request huge pages.
        shape = chunks, _WORD + (n if n <= _SMALL else min(n // chunks + 1, 8 * k + n // 32))
        self.keys: Array = torch.empty(shape, dtype=self.word).numpy()
        self.positions: Array = torch.empty(shape, dtype=torch.int64).numpy()
        self.counts = np.empty(chunks, np.int64)
        self.octave = self.infinity & -self.infinity
        self.threshold: int | None = None
        self.margin = self.octave // 16

    def select(self, x: Tensor, g: Tensor | None, e: Tensor | None) -> Tensor:
        """Return the ascending indices of the k largest of `x`, after ``x = g + e`` if given."""
        k, counts, bits = self.k, self.counts, x.view(self.word).numpy()
        summands: tuple[Any, ...] = None, None, None
        if g is not None and e is not None:
            summands = g.numpy(), e.numpy(), x.numpy()
        word = bits.dtype.type
        # To ignore signs, and so that NaN counts as infinity.
        limits = word((1 << 8 * bits.itemsize - 1) - 1), word(self.infinity)
        rows = self.keys, self.positions, counts
        for guess in (None,) if self.threshold is None else (self.threshold, None):
            if guess is None:
                bound = _bound(summands, bits, k, limits)
            else:
                bound = word(max(guess - self.margin, 0))
            collect = partial(_collect, *summands, bits, bound, *limits, self.ends, *rows)
            if len(counts) == 1:
                collect(0)
            else:
                pool.each(collect, len(counts))
            summands = None, None, None  # `x` is the sum now
            total = int(counts.sum())
            if counts.min() >= 0 and total >= k:
                kept = zip(self.keys, counts, strict=True)
                every = np.concatenate([key[:count] for key, count in kept])
                every.partition(total - k)
                chosen = torch.empty(k, dtype=torch.int64)
                _write(*rows, every[total - k], chosen.numpy())
                self.threshold = int(every[total - k])
                # Aim at an excess of a quarter to a half.
                step = (total - k < k // 4) - (total - k > k // 2)
                margin = self.margin + step * (self.margin >> 3)
                self.margin = min(max(margin, self.octave >> 9), self.octave << 3)
                return chosen
            self.margin *= 4
        return select.largest(x, [Segment(0, self.n, k)])


def _bound(summands: tuple[Any, ...], bits: Array, k: int, limits: tuple[Any, ...]) -> Any:
    """Guess a bound from a sample of the entries."""
    n = bits.size
    if n <= _SMALL:
        return bits.dtype.type(0)
    # A larger sample takes longer, and a smaller one gives a worse guess. This size is fastest if
    # drawing one entry costs four times as much as one excess candidate.
    count = min(n // 16, max(512, round((n * k / 4) ** (1 / 3))))
    expected = count * k / n
    # With this margin, fewer than about 1 in 10,000 samples give fewer than k candidates.
    rank = min(count, math.ceil(expected + 4 * math.sqrt(expected) + 4))
    keys = np.empty(count, bits.dtype)
    _sample(*summands, bits, *limits, keys)
    return np.partition(keys, count - rank)[count - rank]


@kernel()
def _collect(g, e, x, bits, bound, mask, infinity, ends, keys, positions, counts, chunk):
    """Collect a chunk's entries of magnitude `bound` or more, after ``x = g + e``, if any."""
    key, position, end = keys[chunk], positions[chunk], ends[chunk + 1]
    slot, full = np.uint64(0), False
    for start in range(ends[chunk], end, _BLOCK):
        stop = min(start + _BLOCK, end)
        if g is not None:
            first, second, total = g[start:stop], e[start:stop], x[start:stop]
            for i in range(total.size):
                total[i] = first[i] + second[i]
        for at in range(start, stop, _WORD):
            word: Any = np.uint64(0)
            base = np.uint64(at)
            if at + _WORD <= stop:  # a constant number, so that LLVM can vectorize the loop
                for i in range(np.uint64(_WORD)):
                    word |= np.uint64((bits[base + i] & mask) >= bound) << i
            else:
                for i in range(np.uint64(stop - at)):
                    word |= np.uint64((bits[base + i] & mask) >= bound) << i
            if not word:
                continue
            if slot + np.uint64(_WORD) > key.size:  # too many; the rest must still be summed
                slot, full = np.uint64(0), True
            after = slot + np.uint64(ones(word))
            while word:
                # Four at once, even if fewer are left: this mispredicts fewer ends of the loop. The
                # next entries overwrite what this writes in excess.
                for step in range(np.uint64(4)):
                    entry = base + (np.uint64(trailing_zeros(word)) & np.uint64(_WORD - 1))
                    word &= word - np.uint64(1)
                    key[slot + step] = min(bits[entry] & mask, infinity)
                    position[slot + step] = entry
                slot += np.uint64(4)
            slot = after
    counts[chunk] = -1 if full else np.int64(slot)


@kernel()
def _sample(g, e, x, bits, mask, infinity, keys):
    """Write the magnitudes of a sample of the entries to `keys`."""
    width = bits.size / keys.size
    for part in range(keys.size):
        # One entry in each of as many equal parts. Its place there is a hash, because equal steps
        # could coincide with a regular pattern in the vector.
        place = np.float64(part * 2654435761 & 0xFFFFFFFF) / 2.0**32
        at = min(int((part + place) * width), bits.size - 1)
        if g is not None:
            x[at] = g[at] + e[at]
        keys[part] = min(bits[at] & mask, infinity)


@kernel()
def _write(keys, positions, counts, threshold, chosen):
    """Write the indices of keys above the threshold, and of the first ones that are equal to it."""
    room = chosen.size
    for row in range(counts.size):
        key = keys[row, : counts[row]]
        for i in range(key.size):
            room -= key[i] > threshold
    at, stop = np.uint64(0), np.uint64(chosen.size)
    for row in range(counts.size):
        key, position = keys[row], positions[row]
        for i in range(np.uint64(counts[row])):
            if at == stop:
                break
            # Written always, and overwritten if it is not chosen: a branch would be mispredicted.
            chosen[at] = position[i]
            tied = (key[i] == threshold) & (room > 0)
            at += np.uint64((key[i] > threshold) | tied)
            room -= tied
