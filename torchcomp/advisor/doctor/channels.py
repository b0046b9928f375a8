"""Channels: the two ends of a link between two ranks, over TCP or over the process group.

TCP measures what gloo uses. On NCCL, the process group uses other links: NVLink or InfiniBand.
`send` and `receive` take the size of a message; they end within a timeout, or raise OSError.
"""

import socket
import struct
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_HEADER = struct.Struct("<Q")
_CHUNK = 1 << 20


class SocketChannel:
    """One end of a TCP connection."""

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
        self._read(_HEADER.size, end)
        (nbytes,) = _HEADER.unpack_from(self._bytes)
        left = int(nbytes)
        while left:
            left -= self._read(min(left, _CHUNK), end)
        return int(nbytes)

    def close(self) -> None:
        """End the link: its two ends may disagree about what comes next."""
        self.connection.close()

    def _read(self, nbytes: int, end: float) -> int:
        read_into(self._bytes[:nbytes], self.connection, end)
        return nbytes


def read_into(room: memoryview, connection: socket.socket, end: float) -> None:
    """Fill a buffer from a connection, until a time of the monotonic clock."""
    while room:
        limit(connection, end)
        count = connection.recv_into(room)
        if not count:
            raise ConnectionResetError("the other rank closed the connection")
        room = room[count:]


def limit(connection: socket.socket, end: float) -> None:
    """Let the next call end at a time of the monotonic clock."""
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("no end within the timeout")
    connection.settimeout(left)


class GroupChannel:
    """Messages to and from one other rank over the default process group."""

    def __init__(self, other: int, device: torch.device, timeout: float) -> None:
        self.other, self.device, self.timeout = other, device, timeout
        self._bytes = torch.zeros(0, dtype=torch.uint8, device=device)

    def send(self, nbytes: int) -> None:
        self._wait(dist.isend(torch.tensor([nbytes], device=self.device), self.other))
        if nbytes:
            self._wait(dist.isend(self._room(nbytes), self.other))

    def receive(self) -> int:
        size = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._wait(dist.irecv(size, self.other))
        nbytes = int(size.item())
        if nbytes:
            self._wait(dist.irecv(self._room(nbytes), self.other))
        return nbytes

    def close(self) -> None:
        """Do nothing: the backend ends the whole group."""

    def _room(self, nbytes: int) -> torch.Tensor:
        if len(self._bytes) < nbytes:
            self._bytes = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        return self._bytes[:nbytes]

    def _wait(self, work: Any) -> None:
        try:
            work.wait(timedelta(seconds=self.timeout))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            raise OSError(f"the backend says: {error}") from error


Channel = SocketChannel | GroupChannel
