"""Collectives: how long each one takes among some ranks, by the size of its message.

The kinds are those that an :class:`.Exchange` calls. The size of a message is, of an all_reduce and
all_reduce_bf16, the tensor that is summed; of an all_gather, what one rank contributes (control
messages are small ones); of an all_to_all, what one rank sends to the others.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any, Protocol

import numpy
import torch

from torchcomp.exchange import Exchange
from torchcomp.exchange.traffic import COPIED
from torchcomp.specs.checks import check_positive

ALL_REDUCE, ALL_REDUCE_BF16 = "all_reduce", "all_reduce_bf16"
ALL_GATHER, ALL_TO_ALL = "all_gather", "all_to_all"
KINDS = (ALL_REDUCE, ALL_REDUCE_BF16, ALL_TO_ALL, ALL_GATHER)

# Bytes of the messages to measure, as far as there is time.
_SIZES = (64, 2**12, 2**15, 2**18, 2**20, 2**22, 2**24, 2**26)
# gloo sends small messages of an all-gather by an all-to-all: its own curve begins above.
_NOT_COPIED = (COPIED + 2**16, *(size for size in _SIZES if size > COPIED))
_FURTHER = 16  # a curve that reaches this many times as far shows the bandwidth better
_MOST_REPETITIONS = 50


class Times(Protocol):
    """The seconds of collectives, measured or computed."""

    def seconds(self, kind: str, nbytes: float) -> float:
        """Return the seconds of one collective, for a message of this size."""

    def cpu(self, kind: str, nbytes: float) -> float:
        """Return the seconds for which it keeps a core of each rank busy. At most `seconds`."""


def sent_per_byte(kind: str, ranks: int) -> float:
    """Return the bytes that a rank sends for each byte of a message."""
    return {ALL_TO_ALL: 1.0, ALL_GATHER: ranks - 1}.get(kind, 2 * (ranks - 1) / ranks)


@dataclass(frozen=True)
class Point:
    """One measurement: medians over the repetitions, of the slowest rank."""

    nbytes: int  # size of the message
    seconds: float
    cpu: float = 0.0  # seconds of a core that the process of a rank used


@dataclass(frozen=True)
class CollectiveTimes:
    """The measured seconds of the collectives among some ranks.

    Between two measured sizes, the time is a straight line. Times never decrease with the size:
    where measurements do, their mean is used. Below the smallest size, the time is that of the
    smallest. Above the largest, it grows with the median slope between the last three. If a rank
    has sent messages of another kind that are 16 times as long, it is theirs, per byte that it
    sends. An all-gather below the smallest size, or if none was measured, is an all-to-all with a
    copy for each other rank.
    """

    world_size: int
    points: Mapping[str, tuple[Point, ...]]  # the measurements of each kind, by ascending size

    def seconds(self, kind: str, nbytes: float) -> float:
        """Return the seconds of one collective of a kind, for a message of `nbytes`."""
        return self._read(kind, nbytes, 0)

    def cpu(self, kind: str, nbytes: float) -> float:
        """Return the seconds for which a collective keeps a core of each rank busy."""
        return min(self._read(kind, nbytes, 1), self.seconds(kind, nbytes))

    def _read(self, kind: str, nbytes: float, column: int) -> float:
        if kind == ALL_GATHER and ALL_TO_ALL in self._curves:
            sizes, *_ = self._curves.get(ALL_GATHER, ([math.inf],))
            if nbytes < sizes[0]:
                kind, nbytes = ALL_TO_ALL, nbytes * (self.world_size - 1)
        sizes, *columns = self._curves[kind]
        values = columns[column]
        if nbytes <= sizes[-1]:
            return float(numpy.interp(nbytes, sizes, values))
        slope = self._slope(kind, column)
        if len(sizes) > 1:
            # A message that is twice as long takes at most twice as long.
            slope = min(slope, values[-1] / sizes[-1])
        return values[-1] + slope * (nbytes - sizes[-1])

    def _slope(self, kind: str, column: int) -> float:
        sent = {each: sent_per_byte(each, self.world_size) for each in self._curves}
        reach = {each: curve[0][-1] * sent[each] for each, curve in self._curves.items()}
        furthest = max(reach, key=reach.__getitem__)
        # Short messages tell little of the bandwidth.
        if reach[furthest] < _FURTHER * reach[kind]:
            furthest = kind
        sizes, *columns = self._curves[furthest]
        per_byte = _last_slope(sizes, columns[column]) / max(sent[furthest], 1e-9)
        return per_byte * sent[kind]

    @cached_property
    def _curves(self) -> dict[str, tuple[list[float], list[float], list[float]]]:
        """By kind: sizes, seconds and seconds of a core, none of them descending."""
        curves = {}
        for kind, points in self.points.items():
            sizes, seconds, cpu = zip(*((p.nbytes, p.seconds, p.cpu) for p in points), strict=True)
            curves[kind] = [*map(float, sizes)], _ascending(seconds), _ascending(cpu)
        return curves

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings, lists and dicts, for JSON."""
        rows = {kind: [[*vars(each).values()] for each in row] for kind, row in self.points.items()}
        return {"world_size": self.world_size, "points": rows}


def _stopwatch() -> Callable[[], float]:
    """Begin to count the seconds of a core of this process; return what tells them."""
    before = time.process_time()
    return lambda: time.process_time() - before


def measure_collectives(
    exchange: Exchange,
    *,
    seconds: float = 10.0,
    stopwatch: Callable[[], Callable[[], float]] = _stopwatch,
) -> CollectiveTimes:
    """Measure the collectives of an exchange. All ranks call this; all get the same result.

    Sizes grow up to 64 MiB, as long as there is time: about `seconds`, the same on all ranks. The
    counters of the exchange are reset. `stopwatch` begins to count the seconds of a core.
    """
    check_positive("seconds", seconds)
    found = CollectiveTimes(exchange.world_size, {})
    for kind in KINDS:
        points = _measured(exchange, kind, seconds / len(KINDS), found, stopwatch)
        if points:
            found = replace(found, points={**found.points, kind: tuple(points)})
    exchange.take_traffic(0)
    return found


def _measured(
    exchange: Exchange, kind: str, budget: float, found: CollectiveTimes, stopwatch: Any
) -> list[Point]:
    points: list[Point] = []
    sizes: tuple[int, ...] = _SIZES
    if kind == ALL_GATHER and ALL_TO_ALL in found.points and exchange.device.type != "cuda":
        sizes = _NOT_COPIED
        if budget < 4 * found.seconds(ALL_GATHER, sizes[0]):
            return []
    for index, nbytes in enumerate(sizes):
        # Decided from times that the ranks have agreed on: all must make the same calls.
        if points and budget < 2 * points[-1].seconds:
            break
        started = time.perf_counter()
        # The large messages get what the small ones leave.
        points.append(_repeated(exchange, kind, nbytes, budget / (len(sizes) - index), stopwatch))
        (passed,) = _agreed(exchange, [time.perf_counter() - started])
        budget -= passed
    return points


def _repeated(exchange: Exchange, kind: str, nbytes: int, budget: float, stopwatch: Any) -> Point:
    """Measure one kind of collective with one size, once or, if it is short, more often."""
    run = _collective(exchange, kind, nbytes)
    # The first run fills caches and TCP's windows. It counts only if there is no time for another.
    used = stopwatch()
    (first,) = _agreed(exchange, [_timed(exchange, run)])
    repetitions = min(_MOST_REPETITIONS, int(budget / max(1e-9, first)) - 1)
    walls = [first]
    if repetitions > 0:
        used = stopwatch()
        walls = [_timed(exchange, run) for _ in range(repetitions)]
    cpu, *walls = _agreed(exchange, [used() / len(walls), *walls])
    # The lower one of two: what disturbs a measurement makes it longer.
    wall = max(1e-9, statistics.median_low(walls))
    return Point(nbytes, wall, min(wall, cpu))


def _timed(exchange: Exchange, run: Callable[[], object]) -> float:
    # All ranks start together. One that is early would count its wait for the others.
    exchange.all_reduce_max(torch.zeros(1, dtype=torch.int64, device=exchange.device))
    _wait(exchange.device)
    started = time.perf_counter()
    run()
    _wait(exchange.device)
    return time.perf_counter() - started


def _collective(exchange: Exchange, kind: str, nbytes: int) -> Callable[[], object]:
    device, ranks = exchange.device, exchange.world_size
    if kind in (ALL_REDUCE, ALL_REDUCE_BF16):
        dtype = torch.float32 if kind == ALL_REDUCE else torch.bfloat16
        values = torch.zeros(nbytes // dtype.itemsize, dtype=dtype, device=device)
        return lambda: exchange.all_reduce(values)
    if kind == ALL_GATHER:
        mine = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        return lambda: exchange.all_gather_rows(mine)
    # An all-to-all sends an equal part to every rank, this one included.
    whole = math.ceil(nbytes * ranks / max(1, ranks - 1))
    outgoing = torch.zeros(whole, dtype=torch.uint8, device=device)
    sizes = [len(part) for part in outgoing.tensor_split(ranks)]
    arriving = [sizes[exchange.rank]] * ranks
    return lambda: exchange.all_to_all(outgoing, sizes, arriving)


def _agreed(exchange: Exchange, seconds: Sequence[float]) -> list[float]:
    mine = torch.tensor([int(1e9 * each) for each in seconds], dtype=torch.int64)
    agreed = exchange.all_reduce_max(mine.to(exchange.device))
    return [each / 1e9 for each in agreed.tolist()]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _ascending(values: Sequence[float]) -> list[float]:
    """Return the ascending values that are closest to `values`, in the sum of squares."""
    blocks: list[tuple[float, int]] = []  # means, and how many values each is the mean of
    for value in values:
        mean, count = value, 1
        while blocks and blocks[-1][0] > mean:
            before, more = blocks.pop()
            mean, count = (mean * count + before * more) / (count + more), count + more
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]


def _last_slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the median slope between the last three points: that of two has the errors of both."""
    last = list(zip(sizes, values, strict=True))[-3:]
    slopes = [(v - u) / (n - m) for (m, u), (n, v) in combinations(last, 2)]
    return statistics.median(slopes) if slopes else 0.0  # nothing is known from one size
