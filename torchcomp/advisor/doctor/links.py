"""Links: latency and bandwidth between two ranks, in each direction."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchcomp.advisor.doctor.channels import Channel
from torchcomp.advisor.doctor.job import Job
from torchcomp.advisor.doctor.rounds import Pair

_SIZES = (2**12, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24)
_MOST_PINGS, _MOST_REPETITIONS = 20, 5
_LONGEST, _SHORTEST = 0.3, 0.04  # seconds for a link
_ALL = 16.0  # seconds for all links, if they answer at once


@dataclass(frozen=True)
class Link:
    """What was measured from one rank to another.

    Attributes:
        source: the rank that sends.
        target: the rank that receives, and answers with one byte.
        inside: whether both ranks are on one node.
        round_trip: seconds for one byte and its answer, at best.
        points: (bytes of a message, seconds for it and its answer), at best.
        error: why the measurement failed, or "".
    """

    source: int
    target: int
    inside: bool
    round_trip: float = 0.0
    points: tuple[tuple[int, float], ...] = ()
    error: str = ""

    @property
    def latency(self) -> float:
        """Seconds for one byte, one way."""
        return self.round_trip / 2

    @property
    def bandwidth(self) -> float:
        """Bytes per second, from the largest message: a burst can let smaller ones pass."""
        if not self.points:
            return 0.0
        nbytes, seconds = self.points[-1]
        # Without the round trip of an empty message, but at most twice as fast as with it: the
        # difference of two nearly equal times is noise.
        return nbytes / max(seconds - self.round_trip, seconds / 2)

    def better_of(self, other: "Link") -> "Link":
        """Return the faster one of two measurements of the same link, part by part."""
        if self.error or other.error:
            return other if self.error else self
        faster = max(self, other, key=lambda link: link.bandwidth)
        trip = min(self.round_trip, other.round_trip)
        return Link(self.source, self.target, self.inside, trip, faster.points)


def measure_rounds(
    job: Job,
    name: str,
    made: Sequence[Sequence[Pair]],
    nodes: Sequence[int],
    channel_to: Callable[[int], Channel],
) -> list[Link]:
    """Measure pairs, round by round. Every rank gets all links.

    Args:
        job: this rank.
        name: name of the measurement, used once.
        made: the rounds.
        nodes: the node of every rank.
        channel_to: returns the channel to another rank.
    """
    own: list[Link] = []
    budget = min(_LONGEST, max(_SHORTEST, _ALL / 2 / max(1, len(made))))
    # A pair that fails takes up to one timeout in each direction.
    seconds = 2 * job.timeout + job.patience
    for number, members in enumerate(made):
        job.barrier(f"{name}/round {number}", seconds)
        for pair in members:
            if job.rank in pair:
                own.append(_measure_pair(job, pair, nodes, channel_to, budget))
    rows = job.gather(name, [_row(link) for link in own], seconds)
    return [_link(row) for each in rows for row in each]


def _measure_pair(
    job: Job,
    pair: Pair,
    nodes: Sequence[int],
    channel_to: Callable[[int], Channel],
    budget: float,
) -> Link:
    """Measure both directions, one after the other; return the one in which this rank sends."""
    other = pair[0] + pair[1] - job.rank
    inside = nodes[job.rank] == nodes[other]
    channel = channel_to(other)
    try:
        if job.rank == pair[0]:
            trip, points = probe(channel, budget)
            echo(channel)
        else:
            echo(channel)
            trip, points = probe(channel, budget)
    except OSError as error:
        channel.close()
        return Link(job.rank, other, inside, error=str(error))
    return Link(job.rank, other, inside, trip, tuple(points))


def probe(channel: Channel, budget: float) -> tuple[float, list[tuple[int, float]]]:
    """Measure a link, while the other end echoes.

    Returns:
        Seconds of a round trip, and the points of a :class:`Link`. Slow links get the smaller
        sizes only.
    """
    began = time.monotonic()
    _ping(channel, 1)  # the connection may have been idle
    trips = [_ping(channel, 1)]
    while len(trips) < _MOST_PINGS and time.monotonic() - began < budget / 5:
        trips.append(_ping(channel, 1))
    trip = min(trips)
    # A long way needs time for TCP's window to grow.
    end = time.monotonic() + budget + 10 * trip
    points: list[tuple[int, float]] = []
    for nbytes in _SIZES:
        if points and points[-1][1] * nbytes / points[-1][0] > end - time.monotonic():
            break
        times = [_ping(channel, nbytes)]
        while len(times) < _MOST_REPETITIONS and (len(times) + 1) * times[0] < budget / 5:
            times.append(_ping(channel, nbytes))
        points.append((nbytes, min(times)))
    channel.send(0)
    return trip, points


def echo(channel: Channel) -> None:
    """Answer every message with one byte, until an empty one comes."""
    while channel.receive():
        channel.send(1)


def _ping(channel: Channel, nbytes: int) -> float:
    began = time.perf_counter()
    channel.send(nbytes)
    channel.receive()
    return time.perf_counter() - began


def _row(link: Link) -> list[Any]:
    return [*vars(link).values()]


def _link(row: list[Any]) -> Link:
    source, target, inside, trip, points, error = row
    return Link(source, target, inside, trip, tuple((n, seconds) for n, seconds in points), error)
