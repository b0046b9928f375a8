"""Clocks: how far the clock of each rank is from that of rank 0."""

import socket
import struct
import time
from dataclasses import dataclass

from torchcomp.advisor.doctor.job import Job
from torchcomp.advisor.doctor.preflight import Connections

_TIME = struct.Struct("<d")
_PINGS = 10


@dataclass(frozen=True)
class Clock:
    """The clock of a rank.

    Attributes:
        offset: seconds by which it is ahead of that of rank 0.
        error: largest error of the offset in seconds, half a round trip.
    """

    offset: float
    error: float


def measure_clocks(job: Job, connections: Connections) -> list[Clock]:
    """Return the clock of every rank, on all ranks. Links that fail give no clock: NaN."""
    rows: list[tuple[float, float]] = [(0.0, 0.0)]
    job.barrier("clocks")
    if job.rank == 0:
        for other in range(1, job.world_size):
            connection = connections.between(other)
            connection.settimeout(job.timeout)
            try:
                rows.append(min((_asked(connection) for _ in range(_PINGS)), key=_error))
            except OSError:
                rows.append((float("nan"), 0.0))
    else:
        _answer(connections.between(0), job.patience + job.timeout)
    rows = job.gather("clock rows", rows, job.patience + job.world_size * job.timeout)[0]
    return [Clock(*row) for row in rows]


def _asked(connection: socket.socket) -> tuple[float, float]:
    """Return the offset by one ping-pong, from its middle, and the largest error."""
    sent = time.time()
    connection.sendall(b"?")
    answer = connection.recv(_TIME.size, socket.MSG_WAITALL)
    if len(answer) < _TIME.size:
        raise ConnectionError("the other rank closed the connection")
    (there,) = _TIME.unpack(answer)
    received = time.time()
    return there - (sent + received) / 2, (received - sent) / 2


def _answer(connection: socket.socket, seconds: float) -> None:
    connection.settimeout(seconds)
    try:
        for _ in range(_PINGS):
            if not connection.recv(1):
                return
            connection.sendall(_TIME.pack(time.time()))
    except OSError:
        return  # rank 0 says so


def _error(row: tuple[float, float]) -> float:
    return row[1]
