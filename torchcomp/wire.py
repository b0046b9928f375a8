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

import torch
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

INTACT, OTHER_VERSION, OTHER_LENGTH, DAMAGED = range(4)
"""The results of :func:`finding`."""

FINDINGS = {
    OTHER_VERSION: f"has a different version of the wire format than this rank's version {VERSION}",
    OTHER_LENGTH: "has a different length than this rank expects",
    DAMAGED: "was damaged on the way: its checksum does not match its bytes",
}

Layout = tuple[Field, ...]
Parts = tuple[Tensor, ...]


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


def signature(length: int) -> int:
    """Return the first word of the frame of a message of `length` bytes."""
    return 256 * length + VERSION


def headers(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a row of uint8 for each frame: its header without the checksum, and 8 zeros.

    Args:
        lengths: size of each message in bytes.
        device: device of the frames.
    """
    return host.copy_to(_headers(lengths), device)


# Small: with an exact selection, the lengths are others in almost every step.
@lru_cache(maxsize=256)
def _headers(lengths: tuple[int, ...]) -> Tensor:
    # Kept on the CPU: kept on a device, it could be read on another stream than the copy's.
    return torch.tensor([[signature(length), 0, 0] for length in lengths]).view(torch.uint8)


def finding(header: int, checksum: int) -> int:
    """Return INTACT, or the first that applies of OTHER_VERSION, OTHER_LENGTH and DAMAGED.

    Args:
        header: the first number that :func:`torchcomp.kernels.checksum.inspect` returns for a
            frame.
        checksum: the second number.
    """
    # The version is the lowest byte of the first word.
    if header & 255:
        return OTHER_VERSION
    if header:
        return OTHER_LENGTH
    return DAMAGED if checksum else INTACT


def raw(parts: Sequence[Tensor], layout: Layout) -> list[Tensor]:
    """Return the fields of one message as bytes, after a check of their dtypes and sizes.

    Raises:
        ValueError: if a part has another dtype or size than its field in the layout.
    """
    for part, field in zip(parts, layout, strict=True):
        if part.dtype != field.dtype or part.numel() != field.count:
            raise ValueError(
                f"field '{field.name}' is {field.count} x {field.dtype} in the layout, but the "
                f"compressor returned {part.numel()} x {part.dtype}"
            )
    return [part.contiguous().view(torch.uint8) for part in parts]


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
