"""Exact selection in Numba, for the CPU. It takes little more than one pass over the memory.

The pass adds the summands, and collects as candidates the entries above a lower bound of the k-th
largest magnitude. NumPy finds the k-th largest candidate. The bound comes from the last selection
or from a sample. If both fail, all entries are candidates: a bound never changes the result.
Magnitudes are compared by their bits, which have the same order. NaN counts as infinity.
"""

import math
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload
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

_TIGHT, _LOOSE = 0.25, 2.0
"""Minimum and maximum number of excess candidates that a guess aims at, in units of k."""

_BLOCK = 256
"""Number of entries that are added, and then compared with the bound, while they are in a cache."""

_WORD = 64
"""Number of entries that are compared together. Each sets one bit of a 64-bit integer."""

_BURST = 4
"""Number of candidates that are stored without a branch in between."""

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

    Only one thread can use an instance at a time. Chunk i spans ``ends[i]`` to ``ends[i + 1]``.
    `keys` and `positions` have a row for each chunk: the magnitudes of its candidates as bits, and
    their positions in the chunk. `counts` has their number; -1 if the row was too short. `lowest`
    is the bound for the next selection, and `spare` the excess candidates that it aims at, in units
    of k.
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
        self.every: Array = torch.empty(self.keys.size, dtype=self.word).numpy()
        self.counts = np.empty(chunks, np.int64)
        word = self.keys.dtype.type
        self.limits = word((1 << 8 * self.keys.itemsize - 1) - 1), word(self.infinity)
        self.lowest: int | None = None
        self.spare = _TIGHT

    def select(self, x: Tensor, g: Tensor | None, e: Tensor | None) -> Tensor:
        """Return the indices of the k largest entries of `x`, ascending."""
        k, bits = self.k, x.view(self.word).numpy()
        summands: tuple[Any, ...] = None, None, None
        if g is not None and e is not None:
            # Numba has no bfloat16, so pass its bits.
            first = g.view(torch.uint16) if g.dtype == torch.bfloat16 else g
            summands = first.numpy(), e.numpy(), x.numpy()
        for sampling in (False, True) if self.lowest is not None else (True,):
            # At most infinity: NaN has larger bits but ranks equal.
            bound = self._sampled(summands, bits) if sampling else self.lowest or 0
            total = self._collect(summands, bits, bound)
            summands = None, None, None  # `x` now contains the sum, even if the guess was bad
            if total >= k:
                kept = zip(self.keys, self.counts.tolist(), strict=True)
                every = self.every[:total]
                np.concatenate([row[:count] for row, count in kept], out=every)
                every.partition(total - k)
                threshold, chosen = every[total - k], torch.empty(k, dtype=torch.int64)
                rows = self.keys, self.positions, self.ends, self.counts
                _write(*rows, threshold, chosen.numpy())
                self._lower(int(threshold), bound, total - k)
                return chosen
            if total >= 0:  # too few candidates: the bound was too high, so aim lower next time
                self.spare = min(2 * self.spare, _LOOSE)
        self.lowest = None  # both guesses failed
        return select.largest(x, [Segment(0, self.n, k)])

    def _collect(self, summands: tuple[Any, ...], bits: Array, bound: int) -> int:
        """Collect the entries of magnitude `bound` or more; return how many, -1 for too many."""
        task = *summands, bits, bits.dtype.type(bound), *self.limits
        rows = self.ends, self.keys, self.positions, self.counts
        if self.counts.size == 1:
            _collect(*task, *rows, 0)
        else:
            pool.each(lambda chunk: _collect(*task, *rows, chunk), self.counts.size)
        counts = self.counts.tolist()
        return sum(counts) if min(counts) >= 0 else -1

    def _sampled(self, summands: tuple[Any, ...], bits: Array) -> int:
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
        keys = np.empty(count, bits.dtype)
        _sample(*summands, bits, *self.limits, keys)
        return int(np.partition(keys, count - rank)[count - rank])

    def _lower(self, threshold: int, bound: int, spare: int) -> None:
        """Set the next bound, for ``self.spare * k`` excess entries; `spare` passed `bound`."""
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


def _number(value: Any) -> Any:
    """Return a summand; bfloat16 comes as 16-bit integers. For compiled functions only."""
    raise NotImplementedError


@overload(_number, inline="always")
def _choose_number(value: Any) -> Any:
    def widened(value: Any) -> Any:
        return np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)

    def unchanged(value: Any) -> Any:
        return value

    return widened if value == types.uint16 else unchanged


def _make_passing(context: Any, bits: Any, at: Any, mask: Any, bound: Any) -> Any:
    """Compare the magnitudes of 64 entries from `at` with the bound: one bit per entry.

    With plain loops, an encoding of 1e4 of 1e6 entries took 1.3 times as long (measured).
    """
    lanes = ir.VectorType(ir.IntType(bits.dtype.bitwidth), _WORD)

    def generate(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        def spread(word: Any) -> Any:
            first = builder.insert_element(
                ir.Constant(lanes, ir.Undefined), word, ir.IntType(32)(0)
            )
            zeros = ir.Constant(ir.VectorType(ir.IntType(32), _WORD), None)
            return builder.shuffle_vector(first, first, zeros)

        data = target.make_array(bits)(target, builder, args[0]).data
        pointer = builder.bitcast(builder.gep(data, [args[1]]), lanes.as_pointer())
        # Tensors can start anywhere, so promise LLVM only the alignment of one element.
        entries = builder.load(pointer, align=bits.dtype.bitwidth // 8)
        passes = builder.icmp_unsigned(
            ">=", builder.and_(entries, spread(args[2])), spread(args[3])
        )
        return builder.bitcast(passes, ir.IntType(_WORD))

    return types.uint64(bits, types.int64, mask, bound), generate


_passing: Any = intrinsic(_make_passing)


@kernel()
def _collect(g, e, x, bits, bound, mask, infinity, ends, keys, positions, counts, chunk):
    """Collect a chunk's entries of magnitude `bound` or more, after ``x = g + e``, if any."""
    key, position, begin, end = keys[chunk], positions[chunk], ends[chunk], ends[chunk + 1]
    count = 0
    for start in range(begin, end, _BLOCK):
        stop = min(start + _BLOCK, end)
        if g is not None:
            first, second, total = g[start:stop], e[start:stop], x[start:stop]
            for i in range(total.size):
                total[i] = _number(first[i]) + second[i]
        for at in range(start, stop, _WORD):
            word: Any = np.uint64(0)
            if at + _WORD <= stop:
                word = _passing(bits, at, mask, bound)
            else:
                for i in range(at, stop):
                    word |= np.uint64((bits[i] & mask) >= bound) << np.uint64(i - at)
            if not word:
                continue
            if count + 2 * _WORD > key.size:
                # The row is full. Mark the overflow but continue: the rest must still be summed.
                count = 1 << 62
                continue
            slot = np.uint64(count)
            count += ones(word)
            while word:
                # Several at once, even if fewer are left: this mispredicts fewer ends of the loop.
                # The next entries overwrite what this writes in excess.
                for step in range(np.uint64(_BURST)):
                    entry = np.uint64(at) + (np.uint64(trailing_zeros(word)) & np.uint64(_WORD - 1))
                    word &= word - np.uint64(1)
                    key[slot + step] = min(bits[entry] & mask, infinity)
                    position[slot + step] = entry - np.uint64(begin)
                slot += np.uint64(_BURST)
    counts[chunk] = count if count <= key.size else -1


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
            x[at] = _number(g[at]) + e[at]
        keys[part] = min(bits[at] & mask, infinity)


@kernel()
def _write(keys, positions, ends, counts, threshold, chosen):
    """Write the indices of keys above the threshold, and of the first ones that are equal to it."""
    room = chosen.size
    for row in range(counts.size):
        key = keys[row, : counts[row]]
        for i in range(key.size):
            room -= key[i] > threshold
    at, stop = np.uint64(0), np.uint64(chosen.size)
    for row in range(counts.size):
        key, position, begin = keys[row], positions[row], ends[row]
        for i in range(np.uint64(counts[row])):
            if at == stop:
                break
            # Written always, and overwritten if it is not chosen: a branch would be mispredicted.
            chosen[at] = begin + np.int64(position[i])
            tied = (key[i] == threshold) & (room > 0)
            at += np.uint64((key[i] > threshold) | tied)
            room -= tied
