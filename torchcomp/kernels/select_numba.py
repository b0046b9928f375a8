"""Selection in Numba, for the CPU: near the memory floor, and exact.

A selection

1. guesses a lower bound of the k-th largest magnitude, from the last selection or from a sample;
2. collects, in one pass, the entries that are not below the guess: the candidates. The pass goes
   by chunks of the vector, adds the summands on the way, and counts digits of the candidates;
3. finds the k-th largest magnitude among the candidates by radix, twelve bits a round;
4. writes out the candidates above it and, from the lowest index on, those equal to it.

After a guess that gives too few candidates, or too many, comes another, and then steps 3 and 4
with the whole vector. So the guess decides how long it takes, and never the result.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcomp.kernels import pool
from torchcomp.kernels import select_passes as passes
from torchcomp.kernels.select import Warm
from torchcomp.kernels.select_passes import Array

_SMALL = 1 << 14
"""A vector of so many entries is not worth a sample: all are candidates."""

_INLINE = 1 << 20
"""So many entries are not worth a second thread: handing over takes 0.1 ms or so (measured)."""

_PLACES = 1 << 32
"""A chunk has no more entries: their places have 32 bits."""

_STREAM = 1 << 19
"""A sum of so many bytes is written past the caches: the next one to read it finds it in none."""

_TIGHT, _LOOSE = 0.25, 2.0
"""How many more candidates than wanted a guess aims at, in units of k: at least and at most."""


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

    @cached_property
    def fine(self) -> Any:
        """Bits below a digit, where the digits share two octaves."""
        return np.uint64(max(self.mantissa + 1 - passes.DIGIT, 0))

    @cached_property
    def coarse(self) -> Any:
        """Bits below a digit, where the digits share all magnitudes."""
        return np.uint64(self.infinity.bit_length() - passes.DIGIT)


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
    return _Selection(x, k, warm, (None, None)).run()


def add_and_select(g: Tensor, e: Tensor, out: Tensor, k: int, warm: Warm) -> Tensor:
    """As :func:`torchcomp.kernels.select.add_and_select`, for 0 < k < n and what `adds` allows."""
    # Numba knows no bfloat16: it goes by its bits.
    first = _FORMATS[g.dtype].bits(g) if g.dtype == torch.bfloat16 else g.numpy()
    return _Selection(out, k, warm, (first, e.numpy())).run()


class Room:
    """Room for the candidates of a vector, and the bound to collect the next ones by.

    Memory that no candidate comes to is never touched, so there is room for several times as many
    as are expected, in every chunk, and it costs little.

    Attributes:
        key: magnitudes of candidates, a row for each chunk.
        place: where in their chunk they are.
        count: number of candidates in each chunk; -1 if the row was too short.
        histogram: of a digit of the magnitudes in each chunk.
        below: number of candidates in each chunk with smaller digits.
        lowest: bits of the bound for the next selection; None at the start.
        spare: how many more candidates than wanted the bound aims at, in units of k.
    """

    def __init__(self, n: int, k: int, form: Format) -> None:
        self.made_for = (n, k, form)
        threads = torch.get_num_threads()
        alone = n <= _INLINE or (threads == 1 and n <= _PLACES)
        chunks = 1 if alone else pool.chunks()
        self.ends = [n * chunk // chunks for chunk in range(chunks + 1)]
        capacity = n if n <= _SMALL else min(n // chunks + 1, 8 * k + n // 32)
        shape = (chunks, capacity + passes.WORD)
        # By torch: NumPy asks for huge pages, of which a row's first candidate would fill one.
        self.key: Array = torch.empty(shape, dtype=form.word).numpy()
        self.place: Array = torch.empty(shape, dtype=torch.uint32).numpy()
        self.count = np.zeros(chunks, np.int64)
        self.histogram = np.zeros((chunks, 1 << passes.DIGIT), np.int32)
        self.below = np.zeros(chunks, np.int64)
        self.lowest: int | None = None
        self.spare = _TIGHT


def _room(warm: Warm, n: int, k: int, form: Format) -> Room:
    room = warm.memo
    if not isinstance(room, Room) or room.made_for != (n, k, form):
        room = warm.memo = Room(n, k, form)
    return room


class _Selection:
    """One selection from the vector `x`, which is yet to be written if there are summands."""

    def __init__(
        self, x: Tensor, k: int, warm: Warm, summands: tuple[Array | None, Array | None]
    ) -> None:
        self.form = _FORMATS[x.dtype]
        self.bits = self.form.bits(x)
        self.k = k
        self.summands = summands
        self.room = _room(warm, x.numel(), k, self.form)
        self.word = self.bits.dtype.type
        self.infinity = self.word(self.form.infinity)
        self.result = torch.empty(k, dtype=torch.int64)
        self.chosen = self.result.numpy()

    def run(self) -> Tensor:
        room = self.room
        attempt = self._attempt_alone if len(room.count) == 1 else self._attempt
        for guess in self._guesses():
            # Above infinity, it would pass over infinities, which rank with NaN.
            bound = min(guess, self.form.infinity)
            total, threshold = attempt(self.word(bound))
            self.summands = None, None  # They are added, even if the guess was bad.
            if total >= self.k:
                room.lowest = self._lowered(threshold, bound, total - self.k)
                return self.result
            if total >= 0:
                room.spare = min(2 * room.spare, _LOOSE)
        threshold = self._of_all()
        room.lowest = self._lowered(threshold, threshold, 0)
        return self.result

    def _guesses(self) -> Iterator[int]:
        if self.room.lowest is not None:
            yield self.room.lowest
        yield self._sampled()

    def _sampled(self) -> int:
        n, k = self.bits.size, self.k
        if n <= _SMALL:
            return 0
        # A larger one takes longer, a smaller one guesses worse: so many take the least, where
        # taking one costs four times as much as a candidate too many.
        at = _places(n, min(n // 16, max(512, round((n * k / 4) ** (1 / 3)))))
        g, e = self.summands
        if g is None or e is None:
            sample = self.bits[at]
        else:
            sample = np.empty(at.size, self.bits.dtype)
            passes.sums(g, e, at, sample)
        sample &= self.word(np.iinfo(self.word).max >> 1)
        expected = at.size * k / n
        # With so many more, hardly one sample in ten thousand gives fewer than k candidates.
        rank = min(at.size, math.ceil(1.1 * expected + 4 * math.sqrt(expected) + 4))
        return int(np.partition(sample, -rank)[-rank])

    def _lowered(self, threshold: int, bound: int, spare: int) -> int:
        """A bound that should let ``room.spare * k`` more entries pass, if nothing changes.

        Between the last bound and the threshold were `spare` entries; their number is taken to grow
        exponentially with the bits below the threshold, as it does for a power law. Too tight a
        bound costs a second pass, too loose a one time for each candidate. Gradients of some
        trainings change by a third from step to step and those of others hardly at all, so the aim
        doubles when a bound was too tight, and otherwise falls slowly.
        """
        room, octave = self.room, 1 << self.form.mantissa
        step = octave // 16
        if spare:
            growth = math.log1p(spare / self.k)
            step = int((threshold - bound) * math.log1p(room.spare) / growth)
        room.spare = max(0.98 * room.spare, _TIGHT)
        return max(threshold - min(max(step, octave // 256), octave // 2), 0)

    def _attempt_alone(self, bound: Any) -> tuple[int, int]:
        """Collects and selects; gives the number of candidates and the k-th largest magnitude."""
        room, form = self.room, self.form
        limits = bound, form.fine, form.coarse, self.infinity
        rows = room.key[0], room.place[0], room.histogram, room.below
        found: tuple[int, int] = passes.select(
            *self.summands, self.bits, self._streams, *limits, *rows, self.chosen
        )
        room.count[0] = found[0]
        return found

    def _attempt(self, bound: Any) -> tuple[int, int]:
        """The same by several threads."""
        room = self.room
        limits = bound, self.form.fine, self.infinity

        def work(chunk: int) -> None:
            part = slice(room.ends[chunk], room.ends[chunk + 1])
            g, e = (None if x is None else x[part] for x in self.summands)
            rows = room.key[chunk], room.place[chunk], room.histogram[chunk]
            vectors = g, e, self.bits[part], self._streams
            room.count[chunk] = passes.collect(*vectors, *limits, *rows)

        pool.each(work, len(room.count))
        total = int(room.count.sum()) if room.count.min() >= 0 else -1
        if total < self.k:
            return total, 0
        keys = [row[:count] for row, count in zip(room.key, room.count, strict=True)]
        return total, self._pick(keys, list(room.place), int(bound), self.form.fine)

    @property
    def _streams(self) -> bool:
        return passes.STREAMS and self.bits.nbytes >= _STREAM

    def _of_all(self) -> int:
        """Selects from the whole vector; gives the k-th largest magnitude."""
        keys = [self.bits[start:end] for start, end in itertools.pairwise(self.room.ends)]
        self._count_digits(keys, 0, self.form.coarse)
        return self._pick(keys, [None] * len(keys), 0, self.form.coarse)

    def _count_digits(self, keys: Sequence[Array], low: int, shift: Any) -> None:
        def work(chunk: int) -> None:
            row = self.room.histogram[chunk]
            passes.count_digits(keys[chunk], np.uint64(low), shift, self.infinity, row)

        _each(keys)(work, len(keys))

    def _pick(
        self, keys: Sequence[Array], places: Sequence[Array | None], low: int, shift: Any
    ) -> int:
        """Chooses the k largest of the keys of each chunk, whose first digits are counted."""
        room, last = self.room, self.room.histogram.shape[1] - 1
        room.below[:] = 0
        sizes = np.array([row.size for row in keys])
        rest, exact = int(sizes.sum()) - self.k, False
        while not exact:
            digit, rest = passes.find_digit(room.histogram, rest, room.below)
            low, finer, exact = passes.interval(
                np.uint64(low), shift, digit, self.form.coarse, last
            )
            if not exact:
                shift = np.uint64(finer)
                self._count_digits(keys, low, shift)
        tied = room.histogram[:, digit]
        ties = int(tied.sum()) - rest
        quota = np.clip(ties - (tied.cumsum() - tied), 0, tied)
        ends = [0, *(sizes - room.below - tied + quota).cumsum()]

        def write(chunk: int) -> None:
            chosen = self.chosen[ends[chunk] : ends[chunk + 1]]
            limits = self.word(low), self.infinity, room.ends[chunk], quota[chunk]
            passes.write(keys[chunk], places[chunk], *limits, chosen)

        _each(keys)(write, len(keys))
        return low


def _each(keys: Sequence[Array]) -> Any:
    """By threads, if there are enough keys."""
    return pool.each if sum(row.size for row in keys) > _INLINE else _one_by_one


def _one_by_one(work: Any, count: int) -> None:
    for turn in range(count):
        work(turn)


def _places(n: int, count: int) -> Array:
    """One place in each of `count` equal parts; by a hash, lest a pattern in the vector fits."""
    part = np.arange(count)
    return part * n // count + (part * 2654435761 >> 8) % (n // count)
