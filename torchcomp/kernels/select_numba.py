"""Selection in Numba, for the CPU: near the memory floor, and exact.

Magnitudes are compared by their bits, which order as the numbers do. A selection

1. guesses a lower bound of the k-th largest magnitude, from the last selection or from a sample;
2. collects, in one pass, the entries that are not below the guess: the candidates. The pass goes
   by chunks of the vector, and adds the summands on the way;
3. finds the k-th largest magnitude among the candidates by radix, twelve bits a round;
4. writes out the candidates above it and, from the lowest index on, those equal to it.

After a guess that gives too few candidates, or too many, comes another, and then steps 3 and 4
with the whole vector. So the guess decides how long it takes, and never the result.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]  # ships no types
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from torchcomp.kernels import pool
from torchcomp.kernels.select import Warm

Array = NDArray[Any]

_SMALL = 1 << 14
"""A vector of so many entries is not worth a sample: all are candidates."""

_INLINE = 1 << 20
"""So many entries are not worth a second thread: handing over takes 0.1 ms or so (measured)."""

_CHUNKS = 4
"""Chunks for each thread, so that one that falls behind leaves work to the others."""

_SAMPLE = 1 << 15
_DIGIT = 12
_WORD = 64
_BLOCK = 2048
"""Entries that are added before they are compared, while they are in the first cache."""


# --- Numbers as integers --------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """How the magnitudes of a dtype look as unsigned integers.

    Attributes:
        word: the integers.
        mantissa: number of bits below the exponent.
        infinity: the largest magnitude; what is above it is NaN.
    """

    word: torch.dtype
    mantissa: int
    infinity: int

    def bits(self, x: Tensor) -> Array:
        """The numbers as integers, signs included, in the memory of `x`."""
        bits: Array = x.view(self.word).numpy()
        return bits


_FORMATS = {
    torch.float16: Format(torch.uint16, 10, 0x7C00),
    torch.bfloat16: Format(torch.uint16, 7, 0x7F80),
    torch.float32: Format(torch.uint32, 23, 0x7F800000),
    torch.float64: Format(torch.uint64, 52, 0x7FF0000000000000),
}

_SUMS = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float64, torch.float64),
)
"""The dtypes of a first summand, and of the second one and the sum, that are added here."""


def takes(x: Tensor) -> bool:
    """Whether :func:`largest` works for this dtype."""
    return x.dtype in _FORMATS


def adds(g: Tensor, e: Tensor, out: Tensor) -> bool:
    """Whether :func:`add_and_select` works for these."""
    alike = g.shape == e.shape == out.shape and e.dtype == out.dtype
    return (
        alike
        and (g.dtype, out.dtype) in _SUMS
        and g.device == e.device == out.device
        and all(t.is_contiguous() for t in (g, e, out))
    )


# --- Selection ------------------------------------------------------------------------------------


def largest(x: Tensor, k: int, warm: Warm) -> Tensor:
    """As :func:`torchcomp.kernels.select.largest`, for 0 < k < n and contiguous `x`."""
    return _Selection(x, k, warm).run()


def add_and_select(g: Tensor, e: Tensor, out: Tensor, k: int, warm: Warm) -> Tensor:
    """As :func:`torchcomp.kernels.select.add_and_select`, for 0 < k < n and what `adds` allows."""
    # Numba knows no bfloat16: it goes by its bits.
    first = _FORMATS[g.dtype].bits(g) if g.dtype == torch.bfloat16 else g.numpy()
    return _Selection(out, k, warm, (first, e.numpy(), out.numpy())).run()


class Room:
    """Room for the candidates of a vector, and the bound to collect the next ones by.

    Memory that no candidate comes to is never touched, so there is room for several times as many
    as are expected, in every chunk, and it costs little.

    Attributes:
        key: magnitudes of candidates, a row for each chunk.
        place: where in their chunk they are.
        count: number of candidates in each chunk; -1 if the row was too short.
        histogram: of a digit of the magnitudes in each chunk.
        lowest: bits of the bound for the next selection; None at the start.
    """

    def __init__(self, n: int, k: int, form: Format) -> None:
        self.made_for = (n, k, form)
        chunks = 1 if n <= _INLINE else _CHUNKS * torch.get_num_threads()
        self.ends = [n * chunk // chunks for chunk in range(chunks + 1)]
        capacity = n if n <= _SMALL else min(n // chunks + 1, 4 * k + n // 256)
        shape = (chunks, capacity + _WORD)
        # By torch: NumPy asks for huge pages, of which a row's first candidate would fill one.
        self.key: Array = torch.empty(shape, dtype=form.word).numpy()
        self.place: Array = torch.empty(shape, dtype=torch.uint32).numpy()
        self.count = np.zeros(chunks, np.int64)
        self.histogram = np.zeros((chunks, 1 << _DIGIT), np.int32)
        self.lowest: int | None = None


def _room(warm: Warm, n: int, k: int, form: Format) -> Room:
    room = warm.memo
    if not isinstance(room, Room) or room.made_for != (n, k, form):
        room = warm.memo = Room(n, k, form)
    return room


class _Selection:
    """One selection from the vector `x`, which is yet to be written if there are summands."""

    def __init__(
        self, x: Tensor, k: int, warm: Warm, summands: tuple[Array, Array, Array] | None = None
    ) -> None:
        self.form = _FORMATS[x.dtype]
        self.bits = self.form.bits(x)
        self.k = k
        self.summands = summands
        self.room = _room(warm, x.numel(), k, self.form)
        word = self.bits.dtype.type
        self.limits = word(np.iinfo(word).max >> 1), word(self.form.infinity)

    def run(self) -> Tensor:
        for guess in self._guesses():
            self._collect(guess)
            self.summands = None  # They are added, even if the guess was bad.
            total = int(self.room.count.sum())
            if self.room.count.min() >= 0 and total >= self.k:
                result, threshold = self._pick(*self._candidates(), total)
                self.room.lowest = self._lowered(threshold, guess, total - self.k)
                return result
        result, threshold = self._pick(*self._everything(), self.bits.size)
        self.room.lowest = self._lowered(threshold, threshold, 0)
        return result

    def _guesses(self) -> Iterator[int]:
        if self.room.lowest is not None:
            yield self.room.lowest
        yield self._sampled()

    def _sampled(self) -> int:
        n = self.bits.size
        if n <= _SMALL:
            return 0
        at = _places(n, min(_SAMPLE, n // 16))
        if self.summands is None:
            sample = self.bits[at]
        else:
            sample = np.empty(at.size, self.bits.dtype)
            g, e, out = self.summands
            _add_some(g, e, at, sample.view(out.dtype))
        sample &= self.limits[0]
        expected = at.size * self.k / n
        # With so many more, hardly one sample in ten thousand gives fewer than k candidates.
        rank = min(at.size, math.ceil(1.1 * expected + 4 * math.sqrt(expected) + 4))
        return int(np.partition(sample, -rank)[-rank])

    def _collect(self, lowest: int) -> None:
        # Above infinity, it would pass over infinities, which rank with NaN.
        room, bound = self.room, self.bits.dtype.type(min(lowest, self.form.infinity))

        def work(chunk: int) -> None:
            part = slice(room.ends[chunk], room.ends[chunk + 1])
            rest = (self.bits[part], bound, *self.limits, room.key[chunk], room.place[chunk])
            if self.summands is None:
                room.count[chunk] = _scan(*rest)
            else:
                g, e, out = self.summands
                room.count[chunk] = _add_and_scan(g[part], e[part], out[part], *rest)

        pool.each(work, len(room.count))

    def _candidates(self) -> tuple[list[Array], list[Array]]:
        room = self.room
        keys = [row[:count] for row, count in zip(room.key, room.count, strict=True)]
        return keys, list(room.place)

    def _everything(self) -> tuple[list[Array], list[None]]:
        ends = self.room.ends
        keys = [self.bits[start:end] for start, end in itertools.pairwise(ends)]
        return keys, [None] * len(keys)

    def _pick(
        self, keys: Sequence[Array], places: Sequence[Array | None], total: int
    ) -> tuple[Tensor, int]:
        """The k largest of the keys of each chunk, and the bits of the smallest of them."""
        each = pool.each if total > _INLINE else _one_by_one
        threshold, ties = self._threshold(keys, each)
        limits: tuple[Any, Any, Any] = (self.bits.dtype.type(threshold), *self.limits)
        tally = np.empty((len(keys), 2), np.int64)

        def count(chunk: int) -> None:
            tally[chunk] = _tally(keys[chunk], *limits)

        each(count, len(keys))
        above, tied = tally.T
        quota = np.clip(ties - (tied.cumsum() - tied), 0, tied)
        ends = [0, *(above + quota).cumsum()]
        result = torch.empty(self.k, dtype=torch.int64)
        chosen = result.numpy()

        def write(chunk: int) -> None:
            place = chosen[ends[chunk] : ends[chunk + 1]]
            offset = self.room.ends[chunk]
            _write(keys[chunk], places[chunk], *limits, offset, quota[chunk], place)

        each(write, len(keys))
        return result, threshold

    def _threshold(self, keys: Sequence[Array], each: Any) -> tuple[int, int]:
        """Bits of the k-th largest key, and how many of those equal to it are among the k."""
        word, histogram = self.bits.dtype.type, self.room.histogram
        prefix, rank, high = 0, self.k, 8 * self.bits.itemsize - 1
        while high:
            low = max(high - _DIGIT, 0)
            known: tuple[Any, Any, Any] = (word(prefix), word(high), word(low))

            def work(chunk: int, known: tuple[Any, Any, Any] = known) -> None:
                _count_digits(keys[chunk], *self.limits, *known, histogram[chunk])

            each(work, len(keys))
            digit, rank = _digit(histogram, rank)
            prefix, high = prefix << (high - low) | digit, low
        return prefix, rank

    def _lowered(self, threshold: int, lowest: int, spare: int) -> int:
        """A bound that should let k/5 more entries pass than are wanted, if nothing changes.

        Between the last bound and the threshold were `spare` entries. Too tight a bound costs a
        second pass, too loose a one time for each candidate.
        """
        octave = 1 << self.form.mantissa
        step = (threshold - lowest) * self.k // (5 * spare) if spare else octave // 16
        return max(threshold - min(max(step, octave // 256), octave // 8), 0)


def _one_by_one(work: Any, count: int) -> None:
    for turn in range(count):
        work(turn)


def _places(n: int, count: int) -> Array:
    """One place in each of `count` equal parts; by a hash, lest a pattern in the vector fits."""
    part = np.arange(count)
    return part * n // count + (part * 2654435761 >> 8) % (n // count)


# --- Kernels --------------------------------------------------------------------------------------


def _make_number(typing_context: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if x != types.uint16:
            return args[0]
        wide = builder.zext(args[0], ir.IntType(32))
        return builder.bitcast(builder.shl(wide, wide.type(16)), ir.FloatType())

    return (types.float32 if x == types.uint16 else x)(x), generate


_number: Any = intrinsic(_make_number)
"""A number as it is, or, if uint16, the one that has these bits in bfloat16."""


def _compare_bits(typing_context: Any, bits: Any, at: Any, lowest: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width = bits.dtype.bitwidth
        vector = ir.VectorType(ir.IntType(width), _WORD)
        data = context.make_array(bits)(context, builder, args[0]).data
        start = builder.bitcast(builder.gep(data, [args[1]]), vector.as_pointer())
        loaded = builder.load(start)
        loaded.align = width // 8
        undefined = ir.Constant(vector, ir.Undefined)
        bound = builder.insert_element(undefined, args[2], ir.IntType(32)(0))
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), _WORD), [0] * _WORD)
        bounds = builder.shuffle_vector(bound, undefined, lanes)
        unsigned = ir.Constant(vector, [(1 << (width - 1)) - 1] * _WORD)
        passes = builder.icmp_unsigned(">=", builder.and_(loaded, unsigned), bounds)
        return builder.bitcast(passes, ir.IntType(_WORD))

    return types.uint64(bits, types.int64, bits.dtype), generate


_passing: Any = intrinsic(_compare_bits)
"""Which of the 64 entries from a place on have a magnitude of at least the bound: a bit each.

Few do, so a branch for each would be mispredicted for each; this takes one instruction for 16.
"""


def _count_trailing_zeros(typing_context: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], cgutils.true_bit)

    return types.int64(types.uint64), generate


_trailing_zeros: Any = intrinsic(_count_trailing_zeros)


@njit(nogil=True, cache=True)
def _passing_last(bits: Array, start: int, stop: int, lowest: Any, unsigned: Any) -> Any:
    word = np.uint64(0)
    for at in range(start, stop):
        if bits[at] & unsigned >= lowest:
            word |= np.uint64(1) << np.uint64(at - start)
    return word


@njit(nogil=True, cache=True)
def _scan_part(
    bits: Array,
    start: int,
    stop: int,
    lowest: Any,
    unsigned: Any,
    infinity: Any,
    key: Array,
    place: Array,
    count: int,
) -> int:
    """Append the candidates among some entries; returns their number, -1 if they do not fit."""
    for at in range(start, stop, _WORD):
        if count + _WORD > key.size:
            return -1
        if at + _WORD <= stop:
            word = _passing(bits, at, lowest)
        else:
            word = _passing_last(bits, at, stop, lowest, unsigned)
        while word:
            i = at + _trailing_zeros(word)
            word &= word - np.uint64(1)
            key[count] = min(bits[i] & unsigned, infinity)
            place[count] = i
            count += 1
    return count


@njit(nogil=True, cache=True)
def _scan(bits: Array, lowest: Any, unsigned: Any, infinity: Any, key: Array, place: Array) -> int:
    return _scan_part(bits, 0, bits.size, lowest, unsigned, infinity, key, place, 0)


@njit(nogil=True, cache=True)
def _add_and_scan(
    g: Array,
    e: Array,
    out: Array,
    bits: Array,
    lowest: Any,
    unsigned: Any,
    infinity: Any,
    key: Array,
    place: Array,
) -> int:
    count = 0
    for start in range(0, out.size, _BLOCK):
        stop = min(start + _BLOCK, out.size)
        # Of slices from 0 on: only then LLVM sees that it can vectorise.
        first, second, total = g[start:stop], e[start:stop], out[start:stop]
        for i in range(total.size):
            total[i] = _number(first[i]) + second[i]
        if count >= 0:
            count = _scan_part(bits, start, stop, lowest, unsigned, infinity, key, place, count)
    return count


@njit(nogil=True, cache=True)
def _add_some(g: Array, e: Array, at: Array, out: Array) -> None:
    for i in range(at.size):
        out[i] = _number(g[at[i]]) + e[at[i]]


@njit(nogil=True, cache=True)
def _count_digits(
    keys: Array, unsigned: Any, infinity: Any, prefix: Any, high: Any, low: Any, counts: Array
) -> None:
    """Of keys with the prefix above bit `high`, how many have which digit from bit `low` on."""
    counts[:] = 0
    for i in range(keys.size):
        key = min(keys[i] & unsigned, infinity)
        if key >> high == prefix:
            counts[(key >> low) & np.uint64((1 << _DIGIT) - 1)] += 1


@njit(nogil=True, cache=True)
def _digit(histogram: Array, rank: int) -> tuple[int, int]:
    """The digit of the rank-th largest, and its rank among those with this digit."""
    digit, count = histogram.shape[1], 0
    while count < rank:
        rank -= count
        digit -= 1
        count = 0
        for chunk in range(histogram.shape[0]):
            count += histogram[chunk, digit]
    return digit, rank


@njit(nogil=True, cache=True)
def _tally(keys: Array, threshold: Any, unsigned: Any, infinity: Any) -> tuple[int, int]:
    """How many keys are above the threshold, and how many equal to it."""
    above = tied = 0
    for i in range(keys.size):
        key = min(keys[i] & unsigned, infinity)
        above += key > threshold
        tied += key == threshold
    return above, tied


@njit(nogil=True, cache=True)
def _write(
    keys: Array,
    places: Any,
    threshold: Any,
    unsigned: Any,
    infinity: Any,
    offset: int,
    ties: int,
    chosen: Array,
) -> None:
    """Write the indices of keys above the threshold, and of the first `ties` equal to it."""
    at = 0
    for i in range(keys.size):
        if at == chosen.size:
            return
        key = min(keys[i] & unsigned, infinity)
        tied = key == threshold and ties > 0
        chosen[at] = offset + (i if places is None else places[i])
        at += key > threshold or tied
        ties -= tied
