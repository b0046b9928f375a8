"""Wire: the static byte layout of a message, and the frame in which it is sent.

A message is the concatenation of its fields without padding. Each field is a C-contiguous
little-endian array. The layout depends only on the number of elements and the dtype, never on the
values. Every compression ratio, plan, table and test takes the size of a message from
:func:`nbytes`.

Messages that are all-reduced are sent without a frame. All others are sent in a frame, so that the
receiver can check them. A frame consists of

1. two little-endian 64-bit words: ``256 * length + version``, and a checksum,
2. the message,
3. zeros, up to a multiple of 8 bytes.

Let w[0], w[1], ... be the words of the frame, with w[1] (the checksum) set to zero. The checksum is
the sum of (2 i + 1) w[i] modulo 2^64. The weights are odd, so every change of a single word is
detected.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcomp import host

VERSION = 4
"""Version of the wire format. It changes whenever the bytes of any message change.

The ranks compare it when a model is registered.
"""


@dataclass(frozen=True)
class Field:
    """One array of a message."""

    name: str  # for error messages
    dtype: torch.dtype  # of the values in the message
    count: int  # number of elements

    @property
    def nbytes(self) -> int:
        """Size of the field in bytes."""
        return self.count * self.dtype.itemsize


HEADER = 16
"""Number of bytes of a frame before the message."""

# INTACT must be the smallest: findings are combined with a maximum, on a rank and over the ranks.
INTACT, OTHER_VERSION, OTHER_LENGTH, DAMAGED = range(4)
"""The results of :func:`inspect`."""

FINDINGS = {
    OTHER_VERSION: f"has a different version of the wire format than this rank's version {VERSION}",
    OTHER_LENGTH: "has a different length than this rank expects",
    DAMAGED: "was damaged on the way: its checksum does not match its bytes",
}

Layout = tuple[Field, ...]
Parts = tuple[Tensor, ...]

_ODD = np.arange(1, 2 << 14, 2)
"""The weights 2 i + 1 of the checksum, for i < 2^14."""


@lru_cache(maxsize=4096)
def nbytes(layout: Layout) -> int:
    """Return the size in bytes of a message with this layout."""
    return sum(field.nbytes for field in layout)


def framed(length: int) -> int:
    """Return the size in bytes of the frame of a message of `length` bytes."""
    return HEADER + -(-length // 8) * 8


def payload(frame: Tensor, length: int) -> Tensor:
    """Return the message of a frame, as a view."""
    return frame[HEADER : HEADER + length]


def seal(frame: Tensor, length: int) -> None:
    """Write the header of a frame. The message and the padding must have been written before.

    Args:
        frame: 1-D uint8 tensor of ``framed(length)`` elements, aligned to 8 bytes.
        length: size of the message in bytes.
    """
    words = frame.view(torch.int64)
    if host.can_read(frame):
        # NumPy: for short frames, the overhead of a torch call exceeds the work.
        header = words.numpy()
        header[0] = _signature(length)
        header[1] = _checksum(header)
    else:
        words[0] = _signature(length)
        words[1] = _checksum_on_device(words)


def inspect(frame: Tensor, length: int) -> int | Tensor:
    """Check the header and the checksum of a received frame, without a host sync.

    Args:
        frame: 1-D uint8 tensor of ``framed(length)`` elements, aligned to 8 bytes.
        length: expected size of the message in bytes.

    Returns:
        INTACT, or the first that applies of OTHER_VERSION, OTHER_LENGTH and DAMAGED. For a frame
        that is not on the CPU, this is a scalar uint8 tensor on its device.
    """
    words = frame.view(torch.int64)
    if host.can_read(frame):
        header = words.numpy()
        if header[0] & 255 != VERSION:
            return OTHER_VERSION
        if header[0] != _signature(length):
            return OTHER_LENGTH
        return INTACT if header[1] == _checksum(header) else DAMAGED
    # The same three comparisons without a branch on a value, which would wait for the device. The
    # last `where` takes precedence.
    found = torch.where(words[1] == _checksum_on_device(words), INTACT, DAMAGED)
    found = torch.where(words[0] == _signature(length), found, OTHER_LENGTH)
    return torch.where(words[0] & 255 == VERSION, found, OTHER_VERSION).to(torch.uint8)


def _signature(length: int) -> int:
    return 256 * length + VERSION


def _checksum(words: NDArray[np.int64]) -> int:
    """Return the checksum as a signed 64-bit number."""
    # The sum below includes w[1], the checksum itself, whose weight is 3.
    total = -3 * int(words[1])
    # In blocks, so that the weights are a constant. The weight of word start + j is 2 start more
    # than the constant weight 2 j + 1.
    for start in range(0, words.size, _ODD.size):
        block = words[start : start + _ODD.size]
        # int64 wraps around silently, which is correct modulo 2^64.
        total += int(np.dot(block, _ODD[: block.size]))
        if start:
            total += 2 * start * int(block.sum())
    # Signed, like the words that it is compared with.
    return (total + 2**63) % 2**64 - 2**63


def _checksum_on_device(words: Tensor) -> Tensor:
    # Sums of int64 wrap around here as well.
    weights = torch.arange(1, 2 * words.numel(), 2, device=words.device)
    weights[1] = 0
    return (words * weights).sum()


def pack(parts: Sequence[Tensor], layout: Layout, out: Tensor) -> None:
    """Write the fields of one message to `out`, a uint8 tensor of ``nbytes(layout)`` elements.

    Raises:
        ValueError: if a part has another dtype or size than its field in the layout.
    """
    for part, field, (start, stop) in zip(parts, layout, _extents(layout), strict=True):
        if part.dtype != field.dtype or part.numel() != field.count:
            raise ValueError(
                f"field '{field.name}' is {field.count} x {field.dtype} in the layout, but the "
                f"compressor returned {part.numel()} x {part.dtype}"
            )
        out[start:stop].copy_(part.contiguous().view(torch.uint8))


def unpack(message: Tensor, layout: Layout) -> Parts:
    """Return the fields of one message, as views into `message` if their alignment allows it.

    Raises:
        ValueError: if the message has another length than the layout.
    """
    # No other code checks the lengths of fields: decoders rely on this.
    if message.numel() != nbytes(layout):
        raise ValueError(
            f"a message of {message.numel()} bytes does not fit a layout of {nbytes(layout)} bytes"
        )
    parts = []
    for field, (start, stop) in zip(layout, _extents(layout), strict=True):
        raw = message[start:stop]
        # A view in a wider dtype must begin at a multiple of its item size.
        aligned = raw.storage_offset() % field.dtype.itemsize == 0
        parts.append((raw if aligned else raw.clone()).view(field.dtype))
    return tuple(parts)


# Cached, like `nbytes`, because every message of every step needs them.
@lru_cache(maxsize=4096)
def _extents(layout: Layout) -> tuple[tuple[int, int], ...]:
    stops = list(accumulate(field.nbytes for field in layout))
    return tuple(zip([0, *stops], stops, strict=False))
