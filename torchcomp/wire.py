"""Wire: the static byte layout of a message, and the frame that it travels in.

A message is the concatenation of its fields, each a C-contiguous little-endian array, without
padding. The layout follows from the number of elements and the dtype alone, never from the values.
:func:`nbytes` is the only source of every ratio, plan, table and test.

Messages that are summed on the way travel as they are. All others travel in a frame, which lets
the receiver check them: two little-endian 64-bit words, ``256 * length + version`` and a checksum,
then the message, then zeros up to a multiple of 8 bytes. With the frame's words w[0], w[1], ... and
w[1] taken as zero, the checksum is the sum of (2 i + 1) w[i] modulo 2^64: the weights are odd, so
that every change of a single word is found.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

VERSION = 4
"""Changes whenever the bytes of any message change; ranks compare it when they register."""


@dataclass(frozen=True)
class Field:
    """One array of a message: its name for errors, its type on the wire, and its length."""

    name: str
    dtype: torch.dtype
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes that the field takes in a message."""
        return self.count * self.dtype.itemsize


HEADER = 16
"""Bytes of a frame before the message."""

INTACT, OTHER_VERSION, OTHER_LENGTH, DAMAGED = range(4)
"""What :func:`inspect` finds."""

FINDINGS = {
    OTHER_VERSION: f"was written in another version of the wire format than {VERSION}",
    OTHER_LENGTH: "has another length than this rank expects",
    DAMAGED: "was damaged on the way: its checksum does not fit its bytes",
}

Layout = tuple[Field, ...]
Parts = tuple[Tensor, ...]

_ODD = np.arange(1, 2 << 14, 2)
"""The weights 2 i + 1 of the checksum, for i < 2^14."""


@lru_cache(maxsize=4096)
def nbytes(layout: Layout) -> int:
    """Bytes of a message with this layout."""
    return sum(field.nbytes for field in layout)


def framed(length: int) -> int:
    """Bytes of the frame of a message of `length` bytes."""
    return HEADER + -(-length // 8) * 8


def payload(frame: Tensor, length: int) -> Tensor:
    """The part of a frame that holds its message, as a view."""
    return frame[HEADER : HEADER + length]


def seal(frame: Tensor, length: int) -> None:
    """Write the header of a frame whose message of `length` bytes and padding are in place.

    `frame` is a 1-D uint8 tensor of ``framed(length)`` elements, aligned to 8 bytes.
    """
    words = frame.view(torch.int64)
    if frame.device.type == "cpu":
        header = words.numpy()
        header[0] = _signature(length)
        header[1] = _checksum(header)
    else:
        words[0] = _signature(length)
        words[1] = _checksum_on_device(words)


def inspect(frame: Tensor, length: int) -> int | Tensor:
    """Whether a received frame is what a rank of this version sends; no host sync.

    The answer is INTACT, or the first that holds of OTHER_VERSION, OTHER_LENGTH and DAMAGED; on a
    device as a scalar uint8 tensor. `frame` is as for :func:`seal`, `length` what is expected.
    """
    words = frame.view(torch.int64)
    if frame.device.type == "cpu":
        header = words.numpy()
        if header[0] & 255 != VERSION:
            return OTHER_VERSION
        if header[0] != _signature(length):
            return OTHER_LENGTH
        return INTACT if header[1] == _checksum(header) else DAMAGED
    found = torch.where(words[1] == _checksum_on_device(words), INTACT, DAMAGED)
    found = torch.where(words[0] == _signature(length), found, OTHER_LENGTH)
    return torch.where(words[0] & 255 == VERSION, found, OTHER_VERSION).to(torch.uint8)


def _signature(length: int) -> int:
    return 256 * length + VERSION


def _checksum(words: NDArray[np.int64]) -> int:
    """The checksum as a signed number; stretch by stretch, so that the weights are a constant."""
    total = -3 * int(words[1])
    for start in range(0, words.size, _ODD.size):
        stretch = words[start : start + _ODD.size]
        total += int(np.dot(stretch, _ODD[: stretch.size]))
        if start:
            total += 2 * start * int(stretch.sum())
    return (total + 2**63) % 2**64 - 2**63


def _checksum_on_device(words: Tensor) -> Tensor:
    weights = torch.arange(1, 2 * words.numel(), 2, device=words.device)
    weights[1] = 0
    return (words * weights).sum()


def pack(parts: Sequence[Tensor], layout: Layout, out: Tensor) -> None:
    """Write the fields of one message into `out`, a uint8 tensor of ``nbytes(layout)`` elements.

    Raises ValueError if a part is not what the layout announces.
    """
    for part, field, (start, stop) in zip(parts, layout, _extents(layout), strict=True):
        if part.dtype != field.dtype or part.numel() != field.count:
            raise ValueError(
                f"field '{field.name}' is announced as {field.count} x {field.dtype}, "
                f"but the compressor made {part.numel()} x {part.dtype}"
            )
        out[start:stop].copy_(part.contiguous().view(torch.uint8))


def unpack(message: Tensor, layout: Layout) -> Parts:
    """Read the fields of one message; views into `message` where its alignment allows.

    Raises ValueError if it has another length. No other code checks the lengths of fields.
    """
    if message.numel() != nbytes(layout):
        raise ValueError(
            f"a message of {message.numel()} bytes does not fit a layout of {nbytes(layout)} bytes"
        )
    parts = []
    for field, (start, stop) in zip(layout, _extents(layout), strict=True):
        raw = message[start:stop]
        aligned = raw.storage_offset() % field.dtype.itemsize == 0
        parts.append((raw if aligned else raw.clone()).view(field.dtype))
    return tuple(parts)


# Kept, as are the lengths above, because every message of every step asks for them.
@lru_cache(maxsize=4096)
def _extents(layout: Layout) -> tuple[tuple[int, int], ...]:
    stops = list(accumulate(field.nbytes for field in layout))
    return tuple(zip([0, *stops], stops, strict=False))
