"""Pre-flight: every rank connects to every other one, before there is a process group.

gloo connects all pairs when the group is made. If one pair cannot, all ranks wait for long and none
says which. Here every pair tries with a short timeout, in both directions, on a port that the
system chooses, as gloo's and NCCL's.
"""

import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from torchcomp.advisor.doctor.addresses import own_address
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
    """A connection that failed.

    Attributes:
        source: the rank that tried to connect.
        target: the rank that it tried to connect to.
        address: where the target listens.
        reason: what the system says.
        host_answers: whether the target's host answers on another port.
    """

    source: int
    target: int
    address: str
    reason: str
    host_answers: bool


class Connections:
    """The listening socket of this rank, and its connections with all other ranks.

    Args:
        job: this rank.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.outgoing: dict[int, socket.socket] = {}
        self.incoming: dict[int, socket.socket] = {}
        self.address = own_address(job.backend)
        self._listener = socket.create_server((self.address, 0), backlog=job.world_size)
        threading.Thread(target=self._accept, daemon=True).start()

    def connect(self) -> list[Unreachable]:
        """Connect every pair of ranks; return all connections of the job that failed."""
        job = self.job
        places = job.gather("addresses", self._listener.getsockname()[:2])
        failed: list[Unreachable] = []

        def attempt(target: int) -> None:
            try:
                self.outgoing[target] = self._connected(*places[target])
            except OSError as error:
                failed.append(self._explained(target, places[target], error))

        _at_once(attempt, [rank for rank in range(job.world_size) if rank != job.rank])
        rows = [vars(each) for each in failed]
        everyone = job.gather("unreachable", rows, 2 * job.timeout)
        return sorted(
            (Unreachable(**row) for rows in everyone for row in rows),
            key=lambda each: (each.source, each.target),
        )

    def between(self, other: int) -> socket.socket:
        """Return the connection with another rank, the same one at both ends."""
        return (self.outgoing if self.job.rank < other else self.incoming)[other]

    def close(self) -> None:
        """Close everything."""
        for each in (self._listener, *self.outgoing.values(), *self.incoming.values()):
            each.close()

    def _connected(self, address: str, port: int) -> socket.socket:
        end = time.monotonic() + _SHARE * self.job.timeout
        connection = socket.create_connection((address, port), timeout=_SHARE * self.job.timeout)
        try:
            connection.settimeout(max(0.1, end - time.monotonic()))
            connection.sendall(_HELLO.pack(_MAGIC, self.job.rank) + _PAYLOAD)
            if connection.recv(1) != _ACK:
                raise ConnectionResetError("another program answers there")
        except TimeoutError:
            connection.close()
            raise TimeoutError(
                "connected, but 64 kB did not get through: is the MTU too large?"
            ) from None
        except OSError:
            connection.close()
            raise
        return connection

    def _accept(self) -> None:
        with suppress(OSError):  # the listener is closed at the end
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(self.job.timeout)
            magic, rank = _HELLO.unpack(_exactly(connection, _HELLO.size))
            if magic != _MAGIC:
                raise ConnectionResetError("another program")
            _exactly(connection, len(_PAYLOAD))
            self.incoming[rank] = connection
            connection.sendall(_ACK)
        except OSError:
            connection.close()  # the rank that connects reports it

    def _explained(self, target: int, place: tuple[str, int], error: OSError) -> Unreachable:
        seconds = _SHARE * self.job.timeout
        reason = str(error)
        if isinstance(error, TimeoutError) and reason == "timed out":
            reason = f"no answer within {seconds:.1f} s"
        elif error.strerror:
            reason = error.strerror.lower()
        answers = _answers(place[0], _SHARE_WHY * self.job.timeout)
        address = f"{place[0]}:{place[1]}"
        return Unreachable(self.job.rank, target, address, reason, answers)


def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    received = bytearray()
    while len(received) < nbytes:
        part = connection.recv(min(1 << 16, nbytes - len(received)))
        if not part:
            raise ConnectionResetError("the other end closed the connection")
        received += part
    return bytes(received)


def _answers(address: str, seconds: float) -> bool:
    try:
        socket.create_connection((address, _CLOSED_PORT), timeout=seconds).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def _at_once(function: Callable[[int], None], ranks: list[int]) -> None:
    # A thread each, not a pool: those that wait in vain would use up the timeout of the others.
    threads = [threading.Thread(target=function, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
