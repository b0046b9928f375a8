"""Ranks: the machine and the software of each one, its clock, and how fast it computes."""

import math
import os
import platform
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

from torchcomp.advisor.doctor.job import Connections, Job, interface_of
from torchcomp.kernels.backend import fast_form
from torchcomp.specs.version import __version__

_TIME = struct.Struct("<d")
_PINGS = 10
_WINDOWS = 6
_SECONDS = 0.15  # of a window
_SIDE = {"cpu": 256, "cuda": 4096}  # of a matrix


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
    found = []
    with suppress(OSError, struct.error):  # a link that failed, or was closed
        connection.settimeout(seconds)
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
    with suppress(OSError):  # rank 0 says so
        connection.settimeout(seconds)
        for _ in range(_PINGS):
            if not connection.recv(1):
                return
            connection.sendall(_TIME.pack(time.time()))


@dataclass(frozen=True)
class Speed:
    """How long one rank took for the same matrix products as the others."""

    seconds: tuple[float, ...]  # of each window
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
    return [Speed(tuple(seconds), busy) for seconds, busy in rows]


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
