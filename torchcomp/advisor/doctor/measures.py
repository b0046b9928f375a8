"""Measures: a rank's machine and clock, how fast it computes, and the links between ranks."""

import itertools
import os
import platform
import random
import re
import socket
import statistics
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchcomp.advisor.doctor.job import Connections, Job, interface_of, read_into
from torchcomp.kernels.backend import fast_form
from torchcomp.specs.version import __version__

Pair = tuple[int, int]

_WINDOWS = 6
_SECONDS = 0.15  # of a window
_SIDE = {"cpu": 256, "cuda": 4096}  # of a matrix
ALL_PAIRS = 16  # up to this many ranks, every pair is measured
_SAMPLES = 3  # above it, every rank has its two neighbours and this many other ranks
_SIZES = (2**12, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24)
_MOST_PINGS, _MOST_REPETITIONS = 20, 5
_LONGEST, _SHORTEST = 0.3, 0.04  # seconds for a link
_ALL = 16.0  # seconds for all links, if they answer at once
_HEADER = struct.Struct("<Q")
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Facts:
    """One rank's machine and software. Versions that do not exist here are ""."""

    host: str
    backend: str  # "gloo" or "nccl"
    node: int
    local_world_size: int  # ranks of the node
    torch: str
    torchcomp: str
    python: str
    nccl: str
    driver: str  # version of the GPU's driver
    gpu: str  # its name
    cores: int  # that this process may use
    threads: int  # that torch uses for an operation
    omp_num_threads: str  # the variable
    shm_bytes: int  # size of /dev/shm, or -1 if there is none
    shm_free: int  # its free bytes, or -1
    kernels: str  # "Numba", "Triton" or "plain torch", which encodes the messages
    address: str  # where other ranks connect to
    interface: str  # its network interface
    mtu: int  # largest packet of the interface, or 0 if it is not known


def own_facts(job: Job, address: str) -> Facts:
    """Return the facts of this rank."""
    interface = interface_of(address)
    mtu = _read(f"/sys/class/net/{interface}/mtu") if interface else ""
    driver = re.search(r"\b\d+\.\d+(\.\d+)?\b", _read("/proc/driver/nvidia/version"))
    on_gpu = job.backend == "nccl"
    nccl: Any = torch.cuda.nccl.version() if on_gpu else ()  # type: ignore[no-untyped-call]
    shm = -1, -1
    with suppress(OSError):
        found = os.statvfs("/dev/shm")
        shm = found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail
    kernels = "Triton" if job.device.type == "cuda" else "Numba"
    return Facts(
        host=socket.gethostname(),
        backend=job.backend,
        node=job.node,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        torch=torch.__version__,
        torchcomp=__version__,
        python=platform.python_version(),
        nccl=".".join(map(str, nccl)),
        driver=driver[0] if driver else "",
        gpu=torch.cuda.get_device_name(job.device) if on_gpu else "",
        cores=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS", ""),
        shm_bytes=shm[0],
        shm_free=shm[1],
        kernels=kernels if fast_form("sparse", job.device.type) else "plain torch",
        address=address,
        interface=interface,
        mtu=int(mtu or 0),
    )


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


@dataclass(frozen=True)
class Clock:
    """The clock of a rank."""

    offset: float  # seconds by which it is ahead of that of rank 0
    error: float  # largest error of the offset in seconds


def measure_clocks(job: Job) -> list[Clock]:
    """Return the clock of every rank, by a barrier, which all begin before the first one ends."""
    job.barrier("clocks")
    began = time.time()
    job.barrier("clocks, again")
    rows = job.gather("clock rows", [began, time.time()])
    first_began, first_ended = rows[0]
    bounds = [(began - first_ended, ended - first_began) for began, ended in rows]
    return [Clock((least + most) / 2, (most - least) / 2) for least, most in bounds]


@dataclass(frozen=True)
class Speed:
    """How long one rank took for the same matrix products as the others."""

    seconds: Sequence[float]  # of each window
    busy: float  # share of these seconds in which the process ran on a core; 1 on a GPU

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the values that a quarter, and three quarters, of all values do not exceed."""
    ordered = sorted(values)
    return ordered[len(ordered) // 4], ordered[(3 * len(ordered) - 1) // 4]


def measure_speed(job: Job, name: str) -> list[Speed]:
    """Compute on all ranks at the same time, and return the speed of each; use a name once."""
    side = _SIDE[job.device.type]
    x = torch.full((side, side), 1 / side, device=job.device)
    _products(x, 3)  # starts threads and loads libraries
    count = max(1, round(_SECONDS * 10 / _products(x, 10)))
    # Rank 0 says how much: the work must be the same.
    count = job.gather(f"{name}/products", count)[0]
    _products(x, count)
    job.barrier(f"{name}/start")
    began, used = time.perf_counter(), time.process_time()
    seconds = [_products(x, count) for _ in range(_WINDOWS)]
    share = (time.process_time() - used) / (time.perf_counter() - began)
    busy = 1.0 if x.is_cuda else min(1.0, share / torch.get_num_threads())
    # A rank with a fifth of the others' speed takes five times as long.
    rows = job.gather(name, [seconds, busy], job.patience + 100 * _WINDOWS * _SECONDS)
    return [Speed(*row) for row in rows]


def _products(x: torch.Tensor, count: int) -> float:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    began = time.perf_counter()
    y = x
    for _ in range(count):
        y = x @ y
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter() - began


@dataclass(frozen=True)
class Link:
    """What was measured from one rank to another."""

    source: int  # the rank that sends
    target: int  # the rank that receives, and answers with one byte
    inside: bool  # whether both ranks are on one node
    round_trip: float = 0.0  # seconds for one byte and its answer, at best
    points: Sequence[tuple[int, float]] = ()  # bytes, seconds for them and the answer, at best
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
    """One end of a TCP connection. What waits for longer than a timeout raises OSError."""

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        connection.settimeout(timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self._bytes = connection, memoryview(bytearray(_CHUNK))

    def send(self, nbytes: int) -> None:
        # The header in one piece with the first bytes: two packets would wait for each other.
        _HEADER.pack_into(self._bytes, 0, nbytes)
        for part in self._parts(_HEADER.size + nbytes):
            self.connection.sendall(part)

    def receive(self) -> int:
        read_into(self._bytes[: _HEADER.size], self.connection)
        nbytes = int(_HEADER.unpack_from(self._bytes)[0])
        for part in self._parts(nbytes):
            read_into(part, self.connection)
        return nbytes

    def _parts(self, nbytes: int) -> list[memoryview]:
        whole, rest = divmod(nbytes, _CHUNK)
        return [self._bytes] * whole + [self._bytes[:rest]]


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
    rows = job.gather(name, [vars(link) for link in own], seconds)
    return [Link(**row) for each in rows for row in each]


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


def probe(channel: Channel, budget: float) -> tuple[float, list[tuple[int, float]]]:
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
