"""Clocks: how far the clock of each rank is from that of rank 0."""

import math
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass

from torchcomp.advisor.doctor.job import Job
from torchcomp.advisor.doctor.preflight import Connections

_TIME = struct.Struct("<d")
_PINGS = 10


@dataclass(frozen=True)
class Clock:
    """The clock of a rank."""

    offset: float  # seconds by which it is ahead of that of rank 0; NaN if its link failed
    error: float  # largest error of the offset in seconds, half a round trip


def measure_clocks(job: Job, connections: Connections) -> list[Clock]:
    """Return the clock of every rank, on all ranks."""
    job.barrier("clocks")
    rows = [(0.0, 0.0)]
    if job.rank == 0:
        others = map(connections.between, range(1, job.world_size))
        rows += [_offset(connection, job.timeout) for connection in others]
    else:
        _answer(connections.between(0), job.patience + job.timeout)
    rows = job.gather("clock rows", rows, job.patience + job.world_size * job.timeout)[0]
    return [Clock(*row) for row in rows]


def _offset(connection: socket.socket, seconds: float) -> tuple[float, float]:
    """Return the offset by the shortest of some ping-pongs, and its largest error."""
    connection.settimeout(seconds)
    found = []
    with suppress(OSError, struct.error):  # a link that failed, or was closed
        for _ in range(_PINGS):
            sent = time.time()
            connection.sendall(b"?")
            (there,) = _TIME.unpack(connection.recv(_TIME.size, socket.MSG_WAITALL))
            received = time.time()
            found.append(((received - sent) / 2, there - (sent + received) / 2))
        error, offset = min(found)
        return offset, error
    return math.nan, 0.0


def _answer(connection: socket.socket, seconds: float) -> None:
    connection.settimeout(seconds)
    with suppress(OSError):  # rank 0 says so
        for _ in range(_PINGS):
            if not connection.recv(1):
                return
            connection.sendall(_TIME.pack(time.time()))
