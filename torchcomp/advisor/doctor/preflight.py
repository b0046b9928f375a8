"""Pre-flight: every rank connects to every other one, before there is a process group.

gloo connects all pairs when the group is made. If one pair cannot, all ranks wait for long and none
says which. Here every pair tries with a short timeout, in both directions, on a port that the
system chooses, as gloo's and NCCL's.
"""

import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread

from torchcomp.advisor.doctor.addresses import own_address
from torchcomp.advisor.doctor.channels import read_into
from torchcomp.advisor.doctor.job import Job

_HELLO = struct.Struct("<8sI")
_MAGIC = b"tcdoctor"
_PAYLOAD = bytes(1 << 16)  # many full packets: a wrong MTU loses full packets only
_ACK = b"!"
# Shares of the timeout: for the connection, and for finding out why there is none.
_SHARE, _SHARE_WHY = 0.6, 0.25
_CLOSED_PORT = 1  # tcpmux, which nobody serves: a host that lives refuses at once


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
        """Close everything."""
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
        end = time.monotonic() + _SHARE * self.job.timeout
        connection = socket.create_connection((address, port), timeout=_SHARE * self.job.timeout)
        try:
            connection.settimeout(max(0.1, end - time.monotonic()))
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
            read_into(hello, connection, time.monotonic() + self.job.timeout)
            magic, rank = _HELLO.unpack_from(hello)
            if magic != _MAGIC:
                raise ConnectionResetError("another program")
            self.incoming[rank] = connection
            connection.sendall(_ACK)
        except OSError:
            connection.close()  # the rank that connects reports it


def _answers(address: str, seconds: float) -> bool:
    try:
        socket.create_connection((address, _CLOSED_PORT), timeout=seconds).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True
