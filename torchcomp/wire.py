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

from collections.abc import Iterable, Sequence
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

INTACT, OTHER_VERSION, OTHER_LENGTH, DAMAGED = range(4)
"""The results of :func:`finding`."""

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


def headers(lengths: Sequence[int], device: torch.device) -> Iterable[Tensor]:
    """Return a row of bytes for each frame: its header without the checksum, and 8 zeros.

    Args:
        lengths: size of each message in bytes.
        device: device of the frames.
    """
    words = torch.tensor([[_signature(length), 0, 0] for length in lengths])
    return host.copy_to(words.view(torch.uint8), device)


def seal(frames: Tensor, sizes: Sequence[int]) -> None:
    """Write the checksums of frames. All other bytes must have been written, and these be zero.

    Args:
        frames: 1-D uint8, one frame after another. Aligned to 8 bytes.
        sizes: size of each frame in bytes.
    """
    each = torch.split(frames, list(sizes))
    if host.can_read(frames):
        # NumPy: for short frames, the overhead of a torch call exceeds the work.
        for frame in each:
            words = frame.view(torch.int64).numpy()
            words[1] = _checksum(words)
    elif len(set(sizes)) == 1:
        rows = frames.view(torch.int64).view(len(sizes), -1)
        rows[:, 1].copy_((rows * _weights(rows)).sum(1))
    else:
        rows = _rows(each)
        at = torch.tensor([start // 8 + 1 for start in [0, *accumulate(sizes)][:-1]])
        checksums = (rows * _weights(rows)).sum(1)
        frames.view(torch.int64).index_copy_(0, host.copy_to(at, frames.device), checksums)


def inspect(frames: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """Check the headers and the checksums of received frames, without a host sync.

    Args:
        frames: 1-D uint8 tensors of ``framed(length)`` elements, aligned to 8 bytes.
        lengths: expected size of each message in bytes.

    Returns:
        Two numbers for each frame, (frames, 2) int64 on their device. Both are 0 if the frame is
        intact; otherwise :func:`finding` says what they mean.
    """
    if host.can_read(frames[0]):
        return torch.tensor(
            [_differences(f, length) for f, length in zip(frames, lengths, strict=True)]
        )
    rows = _rows(frames)
    expected: int | Tensor = _signature(lengths[0])
    if len(set(lengths)) > 1:
        signatures = torch.tensor([_signature(length) for length in lengths])
        expected = host.copy_to(signatures, rows.device)
    # The sum has the weight 3 for the checksum itself. It is the checksum plus 3 times itself.
    total = (rows * _weights(rows)).sum(1)
    return torch.stack([rows[:, 0] - expected, torch.sub(total, rows[:, 1], alpha=4)], 1)


def finding(differences: Sequence[int]) -> int:
    """Return INTACT, or the first that applies of OTHER_VERSION, OTHER_LENGTH and DAMAGED.

    Args:
        differences: a row of what :func:`inspect` returns.
    """
    signature, checksum = differences
    # The version is the lowest byte of the signature.
    if signature & 255:
        return OTHER_VERSION
    if signature:
        return OTHER_LENGTH
    return DAMAGED if checksum else INTACT


def _differences(frame: Tensor, length: int) -> tuple[int, int]:
    words = frame.view(torch.int64).numpy()
    return _signed(int(words[0]) - _signature(length)), _signed(_checksum(words) - int(words[1]))


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
    return _signed(total)


def _signed(number: int) -> int:
    """Return a number modulo 2^64 as a signed 64-bit number."""
    return (number + 2**63) % 2**64 - 2**63


def _weights(rows: Tensor) -> Tensor:
    """Return the weights 2 i + 1 of a row's words."""
    # A sum of int64 wraps around on a device as well.
    return torch.arange(1, 2 * rows.shape[1], 2, device=rows.device)


def _rows(frames: Sequence[Tensor]) -> Tensor:
    """Return frames as the rows of a matrix of words, filled up with zeros."""
    size = max(frame.numel() for frame in frames)
    if any(frame.numel() < size for frame in frames):
        # Zeros do not change a checksum.
        zeros = frames[0].new_zeros(size)
        frames = [part for frame in frames for part in (frame, zeros[frame.numel() :])]
    return torch.cat(list(frames)).view(-1, size).view(torch.int64)


def pack(parts: Sequence[Tensor], layout: Layout, out: Tensor) -> None:
    """Write the fields of one message to `out`, a uint8 tensor of ``nbytes(layout)`` elements.

    Raises:
        ValueError: if a part has another dtype or size than its field in the layout.
    """
    torch.cat(raw(parts, layout), out=out)


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
