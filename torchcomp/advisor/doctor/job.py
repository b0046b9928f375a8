"""Job: this process among the ranks that torchrun started, and its connections with the others.

All goes through the store of the job, with short timeouts: a rank or a link that is lost is named,
where ``init_process_group`` would hang. Ports and addresses are chosen as the backend does.
"""

import fcntl
import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.rendezvous import rendezvous

from torchcomp.specs.errors import SpecError


class NotMeasured(RuntimeError):
    """The job cannot be measured: a rank is missing, or a script failed."""


@dataclass(frozen=True)
class Job:
    """This rank, and how it reaches the others before there is a process group."""

    rank: int
    world_size: int
    local_rank: int
    node: int
    backend: str  # "gloo" or "nccl"
    timeout: float  # seconds that one answer of another rank can take
    store: Any  # of torch.distributed; its keys are doctor's alone

    @property
    def device(self) -> torch.device:
        cuda = self.backend == "nccl"
        return torch.device("cuda", self.local_rank) if cuda else torch.device("cpu")

    @property
    def patience(self) -> float:
        """Seconds to wait for ranks that work on something else, or that start."""
        return 4 * self.timeout

    def gather(self, name: str, value: Any, seconds: float | None = None) -> list[Any]:
        """Return every rank's `value`, which fits into JSON, in rank order; use a name once."""
        keys = [f"{name}/{rank}" for rank in range(self.world_size)]
        seconds = self.patience if seconds is None else seconds
        try:
            self.store.set(keys[self.rank], json.dumps(value))
            self.store.wait(keys, timedelta(seconds=seconds))
        except dist.DistStoreError:
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            raise NotMeasured(
                f"{ranks_named(missing)} of {self.world_size} did not report {name!r} within "
                f"{seconds:.0f} s: look at the logs of these ranks"
            ) from None
        except dist.DistError as error:
            raise NotMeasured(f"the store of the job was lost: {error}") from None
        return [json.loads(text) for text in self.store.multi_get(keys)]

    def barrier(self, name: str, seconds: float | None = None) -> None:
        self.gather(name, None, seconds)

    def is_first(self, name: str) -> bool:
        """Return whether no other rank has asked this with the same name."""
        try:
            return int(self.store.add(f"{name}/asked", 1)) == 1
        except dist.DistError:
            return self.rank == 0  # without the store, nobody knows


def join(backend: str | None, timeout: float) -> Job:
    """Find the other ranks, as torchrun's variables describe them; without them, be alone."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")
    rank, world_size, local_rank, node = (
        int(os.environ.get(name, name == "WORLD_SIZE")) for name in names
    )
    has_gpu = torch.cuda.device_count() > local_rank
    if backend is None:
        backend = "nccl" if has_gpu else "gloo"
    elif backend == "nccl" and not has_gpu:
        raise SpecError(
            f"--backend nccl: local rank {local_rank} has no GPU, this machine has "
            f"{torch.cuda.device_count()}. Start fewer ranks per node, or take --backend gloo"
        )
    store = HashStore() if world_size == 1 else _store(rank, world_size, 4 * timeout)
    return Job(rank, world_size, local_rank, node, backend, timeout, store)


def _store(rank: int, world_size: int, seconds: float) -> Any:
    try:
        limit = timedelta(seconds=seconds)
        store, *_ = next(iter(rendezvous("env://", rank, world_size, timeout=limit)))
    except (dist.DistError, RuntimeError, ValueError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise NotMeasured(
            f"rank {rank} cannot reach the store of the job at {address}, which rank 0 or torchrun "
            f"keeps there: check the address, the port and the firewall. {error}"
        ) from None
    # Keys apart from those of the process groups of a user's script.
    return PrefixStore("torchcomp-doctor", store)


def ranks_named(ranks: Sequence[int]) -> str:
    """Return ranks as words, such as "rank 3" or "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"


_HELLO = struct.Struct("<8sI")
_MAGIC = b"tcdoctor"
_PAYLOAD = bytes(1 << 16)  # many full packets: a wrong MTU loses full packets only
_ACK = b"!"
# Shares of the timeout: for the connection, and for finding out why there is none.
_SHARE, _SHARE_WHY = 0.6, 0.25
_CLOSED_PORT = 1  # tcpmux, which nobody serves: a host that lives refuses at once
_SIOCGIFADDR = 0x8915
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Unreachable:
    """A connection that failed."""

    source: int  # the rank that tried to connect
    target: int
    address: str  # where the target listens
    reason: str  # what the system says
    host_answers: bool  # whether the target's host answers on another port


class Connections:
    """The listening socket of this rank, and its connections with all other ranks."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.outgoing: dict[int, socket.socket] = {}
        self.incoming: dict[int, socket.socket] = {}
        self.address = own_address(job.backend)
        self._failed: list[Unreachable] = []
        self._listener = socket.create_server((self.address, 0), backlog=job.world_size)
        Thread(target=self._accept, daemon=True).start()

    def connect(self) -> list[Unreachable]:
        """Connect every pair of ranks; return all connections of the job that failed."""
        places = enumerate(self.job.gather("addresses", self._listener.getsockname()[:2]))
        # A thread each, not a pool: those that wait in vain would use up the timeout of the others.
        others = [(target, *place) for target, place in places if target != self.job.rank]
        threads = [Thread(target=self._try, args=other, daemon=True) for other in others]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rows = self.job.gather("unreachable", [*map(vars, self._failed)], 2 * self.job.timeout)
        every = (Unreachable(**row) for own in rows for row in own)
        return sorted(every, key=lambda each: (each.source, each.target))

    def between(self, other: int) -> socket.socket:
        """Return the connection with another rank, the same one at both ends."""
        return (self.outgoing if self.job.rank < other else self.incoming)[other]

    def close(self) -> None:
        for each in (self._listener, *self.outgoing.values(), *self.incoming.values()):
            each.close()

    def _try(self, target: int, address: str, port: int) -> None:
        try:
            self.outgoing[target] = self._connected(address, port)
        except OSError as error:
            reason = error.strerror.lower() if error.strerror else str(error)
            if reason == "timed out":
                reason = f"no answer within {_SHARE * self.job.timeout:.1f} s"
            answers = _answers(address, _SHARE_WHY * self.job.timeout)
            place = f"{address}:{port}"
            self._failed.append(Unreachable(self.job.rank, target, place, reason, answers))

    def _connected(self, address: str, port: int) -> socket.socket:
        connection = socket.create_connection((address, port), timeout=_SHARE * self.job.timeout)
        try:
            connection.sendall(_HELLO.pack(_MAGIC, self.job.rank) + _PAYLOAD)
            if connection.recv(1) != _ACK:
                raise ConnectionResetError("another program answers there")
        except OSError as error:
            connection.close()
            if isinstance(error, TimeoutError):
                why = "connected, but 64 kB did not get through: is the MTU too large?"
                raise TimeoutError(why) from None
            raise
        return connection

    def _accept(self) -> None:
        with suppress(OSError):  # the listener is closed at the end
            while True:
                connection, _ = self._listener.accept()
                Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            hello = memoryview(bytearray(_HELLO.size + len(_PAYLOAD)))
            connection.settimeout(self.job.timeout)
            read_into(hello, connection)
            magic, rank = _HELLO.unpack_from(hello)
            if magic != _MAGIC:
                raise ConnectionResetError("another program")
            self.incoming[rank] = connection
            connection.sendall(_ACK)
        except OSError:
            connection.close()  # the rank that connects reports it


def read_into(room: memoryview, connection: socket.socket) -> None:
    """Fill a buffer from a connection."""
    while room:
        count = connection.recv_into(room)
        if not count:
            raise ConnectionResetError("the other rank closed the connection")
        room = room[count:]


def _answers(address: str, seconds: float) -> bool:
    try:
        socket.create_connection((address, _CLOSED_PORT), timeout=seconds).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return True


def own_address(backend: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the address that other ranks connect to.

    Without the variable, gloo takes that of the host's name, and NCCL one of a network card; the
    one towards the store of the job is assumed.
    """
    variable = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}[backend]
    wanted = environment.get(variable, "")
    if wanted:
        for address in filter(None, map(_address_of, _matching(wanted, backend))):
            return address
        raise SpecError(
            f"{variable}={wanted}: no such interface has an IPv4 address here; there are "
            f"{', '.join(_interfaces())}"
        )
    kind = socket.SOCK_STREAM if backend == "gloo" else socket.SOCK_DGRAM
    with suppress(OSError), socket.socket(socket.AF_INET, kind) as probe:
        if backend == "gloo":
            probe.bind((socket.gethostname(), 0))
        else:
            probe.connect((environment.get("MASTER_ADDR", _LOOPBACK), 1))  # sends nothing
        return str(probe.getsockname()[0])
    return _LOOPBACK


def interface_of(address: str) -> str:
    """Return the name of the interface that has an address, or "" if none has."""
    return next((name for name in _interfaces() if _address_of(name) == address), "")


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _matching(wanted: str, backend: str) -> list[str]:
    """Return the interfaces that a variable selects: names, or as NCCL has it."""
    words = wanted.lstrip("^=").split(",")
    if backend == "gloo" or wanted.startswith("="):
        return [name for name in words if name in _interfaces()]
    left_out = wanted.startswith("^")
    return [name for name in _interfaces() if name.startswith(tuple(words)) != left_out]


def _address_of(interface: str) -> str:
    """Return the IPv4 address of an interface, or "" if it has none."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])
