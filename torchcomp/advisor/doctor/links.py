"""Links: latency and bandwidth between two ranks over TCP, in each direction, pair after pair."""

import itertools
import random
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torchcomp.advisor.doctor.job import Connections, limit, read_into

Pair = tuple[int, int]

ALL_PAIRS = 16  # up to this many ranks, every pair is measured
_SAMPLES = 3  # above it, every rank has its two neighbours and this many other ranks
_SIZES = (2**12, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24)
_MOST_PINGS, _MOST_REPETITIONS = 20, 5
_LONGEST, _SHORTEST = 0.3, 0.04  # seconds for a link
_ALL = 16.0  # seconds for all links, if they answer at once
_HEADER = struct.Struct("<Q")
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Link:
    """What was measured from one rank to another."""

    source: int  # the rank that sends
    target: int  # the rank that receives, and answers with one byte
    inside: bool  # whether both ranks are on one node
    round_trip: float = 0.0  # seconds for one byte and its answer, at best
    points: tuple[tuple[int, float], ...] = ()  # bytes, seconds for them and the answer, at best
    error: str = ""  # why the measurement failed

    @property
    def latency(self) -> float:
        return self.round_trip / 2

    @property
    def bandwidth(self) -> float:
        # From the largest message: a burst can let smaller ones pass.
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


def chosen_pairs(world_size: int) -> list[Pair]:
    """Return the pairs to measure, each as (lower rank, higher rank), the same on all ranks."""
    ranks = range(world_size)
    if world_size <= ALL_PAIRS:
        return list(itertools.combinations(ranks, 2))
    draw = random.Random(world_size)
    pairs = {(rank, (rank + 1) % world_size) for rank in ranks}
    for rank in ranks:
        others = [*ranks[:rank], *ranks[rank + 1 :]]
        pairs |= {(rank, other) for other in draw.sample(others, _SAMPLES)}
    return sorted({(min(pair), max(pair)) for pair in pairs})


def rounds(pairs: Sequence[Pair], nodes: Sequence[int]) -> list[list[Pair]]:
    """Divide pairs into rounds in which no two share a rank, or the network card of a node."""
    made: list[tuple[set[tuple[str, int]], list[Pair]]] = []
    # By distance: neighbours at a distance fill a round, as in a round-robin tournament.
    for pair in sorted(pairs, key=lambda pair: (pair[1] - pair[0], pair)):
        uses = {("rank", rank) for rank in pair}
        places = {nodes[rank] for rank in pair}
        if len(places) == 2:
            uses |= {("card", node) for node in places}
        free = (each for each in made if not each[0] & uses)
        used, members = next(free, (set[tuple[str, int]](), list[Pair]()))
        if not members:
            made.append((used, members))
        used |= uses
        members.append(pair)
    return [members for _, members in made]


class Channel:
    """One end of a TCP connection. A call ends within a timeout, or raises OSError."""

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        self.connection, self.timeout = connection, timeout
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._bytes = memoryview(bytearray(_CHUNK))

    def send(self, nbytes: int) -> None:
        end = time.monotonic() + self.timeout
        # The header in one piece with the first bytes: two packets would wait for each other.
        _HEADER.pack_into(self._bytes, 0, nbytes)
        left = _HEADER.size + nbytes
        while left:
            part = self._bytes[:left]
            limit(self.connection, end)
            self.connection.sendall(part)
            left -= len(part)

    def receive(self) -> int:
        end = time.monotonic() + self.timeout
        left = _HEADER.size
        read_into(self._bytes[:left], self.connection, end)
        (nbytes,) = (left,) = _HEADER.unpack_from(self._bytes)
        while left:
            part = self._bytes[:left]
            read_into(part, self.connection, end)
            left -= len(part)
        return int(nbytes)


def measure_rounds(
    connections: Connections, name: str, made: Sequence[Sequence[Pair]], nodes: Sequence[int]
) -> list[Link]:
    """Measure pairs, round by round; use a name once. Every rank gets all links."""
    job, own = connections.job, list[Link]()
    budget = min(_LONGEST, max(_SHORTEST, _ALL / 2 / max(1, len(made))))
    # A pair that fails takes up to one timeout in each direction.
    seconds = 2 * job.timeout + job.patience
    for number, members in enumerate(made):
        job.barrier(f"{name}/round {number}", seconds)
        for pair in members:
            if job.rank in pair:
                (other,) = {*pair} - {job.rank}
                ends = job.rank, other, nodes[job.rank] == nodes[other]
                channel = Channel(connections.between(other), job.timeout)
                own.append(_measured(channel, *ends, budget))
    rows = job.gather(name, [[*vars(link).values()] for link in own], seconds)
    # JSON has lists in place of tuples.
    return [
        Link(source, target, inside, trip, tuple(map(tuple, points)), error)
        for each in rows
        for source, target, inside, trip, points, error in each
    ]


def _measured(channel: Channel, rank: int, other: int, inside: bool, budget: float) -> Link:
    """Measure both directions, one after the other; return the one in which this rank sends."""
    try:
        if rank > other:
            echo(channel)
        found = probe(channel, budget)
        if rank < other:
            echo(channel)
    except OSError as error:
        channel.connection.close()  # its ends may disagree about what comes next
        return Link(rank, other, inside, error=str(error))
    return Link(rank, other, inside, *found)


def probe(channel: Channel, budget: float) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Return a link's round trip and points, while the other end echoes. Slow links get few."""
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
    return trip, tuple(points)


def echo(channel: Channel) -> None:
    """Answer every message with one byte, until an empty one comes."""
    while channel.receive():
        channel.send(1)


def _ping(channel: Channel, nbytes: int) -> float:
    began = time.perf_counter()
    channel.send(nbytes)
    channel.receive()
    return time.perf_counter() - began
