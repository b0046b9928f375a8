"""Collectives: how long each one takes among some ranks, by the size of its message.

The kinds are the collectives that an :class:`.Exchange` calls. The size of a message is:

- all_reduce, all_reduce_bf16: the tensor that is summed;
- all_gather: what one rank contributes. Control messages are small all-gathers;
- all_to_all: what one rank sends to the others, without its part for itself.

gloo sends the small messages of an all-gather by an all-to-all, so its own curve begins above
:data:`.COPIED` bytes.
"""

import math
import statistics
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from torchcomp.checks import check_at_least_0, check_choice, check_count, check_positive
from torchcomp.errors import SpecError
from torchcomp.exchange import Exchange
from torchcomp.traffic import COPIED

ALL_REDUCE, ALL_REDUCE_BF16 = "all_reduce", "all_reduce_bf16"
ALL_GATHER, ALL_TO_ALL = "all_gather", "all_to_all"
KINDS = (ALL_REDUCE, ALL_REDUCE_BF16, ALL_TO_ALL, ALL_GATHER)

_SIZES = (64, 2**12, 2**15, 2**18, 2**20, 2**22, 2**24, 2**26)
"""Bytes of the messages to measure, as far as there is time."""

_NOT_COPIED = (COPIED + 2**16, *(size for size in _SIZES if size > COPIED))
"""Those of the all-gathers that gloo does not send by an all-to-all."""

_MOST_REPETITIONS = 9


class Times(Protocol):
    """The seconds of collectives, measured or computed."""

    def seconds(self, kind: str, nbytes: float) -> float:
        """Return the seconds of one collective, for a message of this size."""

    def cpu(self, kind: str, nbytes: float) -> float:
        """Return the seconds for which it keeps a core of each rank busy. At most `seconds`."""


@dataclass(frozen=True)
class Point:
    """One measurement.

    Attributes:
        nbytes: size of the message.
        seconds: median over the repetitions, of the slowest rank.
        cpu: seconds of a core that the process of a rank used, median over the repetitions.
    """

    nbytes: int
    seconds: float
    cpu: float = 0.0


@dataclass(frozen=True)
class CollectiveTimes:
    """The measured seconds of the collectives among some ranks.

    Between two measured sizes, the time is a straight line. Times never decrease with the size:
    where measurements do, their mean is used. Below the smallest size, the time is that of the
    smallest. Above the largest, it grows as it does on average between the smallest and the
    largest. An all-gather below the smallest size, or if none was measured, is an
    all-to-all with a copy for each other rank.

    Attributes:
        world_size: number of ranks.
        points: the measurements of each kind, by ascending size.
    """

    world_size: int
    points: Mapping[str, tuple[Point, ...]]

    def __post_init__(self) -> None:
        check_count("world_size", self.world_size)
        for kind, points in self.points.items():
            check_choice("kind", kind, KINDS)
            sizes = [point.nbytes for point in points]
            if not sizes or sizes != sorted(set(sizes)):
                raise SpecError(
                    f"points of {kind} must be of ascending sizes, at least one, not {sizes}"
                )
            for point in points:
                check_count("nbytes", point.nbytes)
                check_positive("seconds", point.seconds)
                check_at_least_0("cpu", point.cpu)

    def seconds(self, kind: str, nbytes: float) -> float:
        """Return the seconds of one collective.

        Args:
            kind: one of :data:`KINDS`.
            nbytes: size of the message; see the head of this file.

        Raises:
            SpecError: if this kind was not measured.
        """
        return self._read(kind, nbytes, 0)

    def cpu(self, kind: str, nbytes: float) -> float:
        """Return the seconds for which a collective keeps a core of each rank busy."""
        return min(self._read(kind, nbytes, 1), self.seconds(kind, nbytes))

    def _read(self, kind: str, nbytes: float, column: int) -> float:
        check_at_least_0("nbytes", nbytes)
        if kind == ALL_GATHER and ALL_TO_ALL in self._curves:
            sizes, *_ = self._curves.get(ALL_GATHER, ([math.inf],))
            if nbytes < sizes[0]:
                kind, nbytes = ALL_TO_ALL, nbytes * (self.world_size - 1)
        if kind not in self._curves:
            raise SpecError(
                f"the times of {kind} were not measured, only those of {', '.join(self._curves)}"
            )
        sizes, *columns = self._curves[kind]
        return _interpolated(sizes, columns[column], nbytes)

    @cached_property
    def _curves(self) -> dict[str, tuple[list[float], list[float], list[float]]]:
        """By kind: sizes, seconds and seconds of a core, none of them descending."""
        return {
            kind: (
                [float(point.nbytes) for point in points],
                _ascending([point.seconds for point in points]),
                _ascending([point.cpu for point in points]),
            )
            for kind, points in self.points.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings, lists and dicts, for JSON."""
        return {
            "world_size": self.world_size,
            "points": {
                kind: [[point.nbytes, point.seconds, point.cpu] for point in points]
                for kind, points in self.points.items()
            },
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "CollectiveTimes":
        """Return what :meth:`to_dict` was called on.

        Raises:
            SpecError: if `values` are something else.
        """
        try:
            points = {
                kind: tuple(Point(*row) for row in rows) for kind, rows in values["points"].items()
            }
            world_size = values["world_size"]
        except (KeyError, TypeError, AttributeError) as error:
            raise SpecError(
                f"these are not the times of collectives: {type(error).__name__}: {error}. "
                "Expected what CollectiveTimes.to_dict() returned"
            ) from error
        return cls(world_size, points)


def measure_collectives(
    exchange: Exchange, *, seconds: float = 10.0, kinds: Sequence[str] = KINDS
) -> CollectiveTimes:
    """Measure the collectives of an exchange. All ranks call this; all get the same result.

    Sizes grow up to 64 MiB, as long as there is time. A slow link gets the smaller ones, twice
    each. The counters of the exchange are reset.

    Args:
        exchange: the collectives. No other thread uses it.
        seconds: about how long this takes; the same on all ranks.
        kinds: which collectives to measure, of :data:`KINDS`.

    Raises:
        SpecError: if an argument is invalid.
    """
    check_positive("seconds", seconds)
    for kind in kinds:
        check_choice("kind", kind, KINDS)
    found = CollectiveTimes(exchange.world_size, {})
    for kind in KINDS:
        if kind in kinds:
            points = _measured(exchange, kind, seconds / len(kinds), found)
            if points:
                found = replace(found, points={**found.points, kind: tuple(points)})
    exchange.take_traffic(0)
    return found


def _measured(exchange: Exchange, kind: str, budget: float, found: CollectiveTimes) -> list[Point]:
    """Measure one kind of collective within about `budget` seconds."""
    points: list[Point] = []
    sizes: tuple[int, ...] = _SIZES
    if kind == ALL_GATHER and ALL_TO_ALL in found.points and exchange.device.type != "cuda":
        sizes = _NOT_COPIED
        if budget < 4 * found.seconds(ALL_GATHER, sizes[0]):
            return []
    probe = _repeated(exchange, kind, sizes[0], 2)
    for index, nbytes in enumerate(sizes):
        # Decided from times that the ranks have agreed on: all must make the same calls.
        expected = _expected([probe, *points], nbytes)
        if points and budget < 3 * expected:
            break
        # The large messages get what the small ones leave.
        share = budget / (len(sizes) - index)
        repetitions = max(2, min(_MOST_REPETITIONS, int(share / expected) - 1))
        started = time.perf_counter()
        points.append(_repeated(exchange, kind, nbytes, repetitions))
        budget -= _longest(exchange, time.perf_counter() - started)
    return points


def _repeated(exchange: Exchange, kind: str, nbytes: int, repetitions: int) -> Point:
    """Measure one kind of collective with one size."""
    # The first one fills caches and TCP's windows.
    rows = [_once(exchange, kind, nbytes) for _ in range(repetitions + 1)][1:]
    mine = torch.tensor(rows, dtype=torch.int64).view(-1).to(exchange.device)
    walls, busy = exchange.any_of(mine).view(-1, 2).cpu().T.tolist()
    # The lower one of two: what disturbs a measurement makes it longer.
    wall, cpu = (statistics.median_low(each) / 1e9 for each in (walls, busy))
    return Point(nbytes, max(wall, 1e-9), min(wall, cpu))


def _longest(exchange: Exchange, seconds: float) -> float:
    """Return the seconds of the slowest rank."""
    mine = torch.tensor([int(1e9 * seconds)], dtype=torch.int64).to(exchange.device)
    return exchange.any_of(mine).item() / 1e9


def _expected(points: Sequence[Point], nbytes: int) -> float:
    """Return the seconds of a larger message, from those of smaller ones.

    Small messages tell little of the bandwidth. If this is too little, the next size is at most
    some times as large, and so is the mistake.
    """
    first = points[0].seconds
    slopes = [(point.seconds - first) / point.nbytes for point in points[1:]]
    return first + max(0.0, min(slopes, default=0.0)) * nbytes


def _once(exchange: Exchange, kind: str, nbytes: int) -> tuple[int, int]:
    """Run one collective; return nanoseconds, and those of a core of this process."""
    device, ranks = exchange.device, exchange.world_size
    if kind in (ALL_REDUCE, ALL_REDUCE_BF16):
        dtype = torch.float32 if kind == ALL_REDUCE else torch.bfloat16
        values = torch.zeros(nbytes // dtype.itemsize, dtype=dtype, device=device)
    else:
        # An all-to-all sends an equal part to every rank, this one included.
        copies = 1 if kind == ALL_GATHER else ranks / max(1, ranks - 1)
        values = torch.zeros(math.ceil(nbytes * copies), dtype=torch.uint8, device=device)
    sizes = [len(part) for part in values.tensor_split(ranks)]
    own = [sizes[exchange.rank]] * ranks
    # All ranks start together. One that is early would count its wait for the others.
    exchange.any_of(torch.zeros(1, dtype=torch.int64, device=device))
    _wait(device)
    started, used = time.perf_counter_ns(), time.process_time_ns()
    if kind == ALL_GATHER:
        exchange.all_gather(values)
    elif kind == ALL_TO_ALL:
        exchange.all_to_all(values, sizes, own)
    else:
        exchange.all_reduce(values)
    _wait(device)
    return time.perf_counter_ns() - started, time.process_time_ns() - used


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


def _interpolated(sizes: Sequence[float], values: Sequence[float], at: float) -> float:
    if at <= sizes[0] or len(sizes) == 1:
        # One size only: nothing is known about others.
        return values[0]
    if at >= sizes[-1]:
        # The mean slope of the whole curve: that of the last two points has the errors of both.
        slope = (values[-1] - values[0]) / (sizes[-1] - sizes[0])
        return values[-1] + slope * (at - sizes[-1])
    right = bisect_left(sizes, at)
    left = right - 1
    slope = (values[right] - values[left]) / (sizes[right] - sizes[left])
    return values[left] + slope * (at - sizes[left])
