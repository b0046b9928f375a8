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


def seal(frames: Tensor, lengths: Sequence[int]) -> None:
    """Write the headers of frames. Messages and padding must have been written before.

    Args:
        frames: 1-D uint8, the frames of ``framed(length)`` elements each, one after another.
            Aligned to 8 bytes.
        lengths: size of each message in bytes.
    """
    each = torch.split(frames, [framed(length) for length in lengths])
    if host.can_read(frames):
        # NumPy: for short frames, the overhead of a torch call exceeds the work.
        for length, frame in zip(lengths, each, strict=True):
            header = frame.view(torch.int64).numpy()
            header[0] = _signature(length)
            header[1] = _checksum(header)
        return
    words, sizes = frames.view(torch.int64), [framed(length) // 8 for length in lengths]
    starts = [0, *accumulate(sizes)][:-1]
    table = [starts, [start + 1 for start in starts], [_signature(length) for length in lengths]]
    first, second, signature = host.copy_to(torch.tensor(table), frames.device)
    words.index_copy_(0, first, signature)
    words.index_copy_(0, second, _checksums(_rows(each)))


def inspect(frames: Sequence[Tensor], lengths: Sequence[int]) -> Sequence[int] | Tensor:
    """Check the headers and the checksums of received frames, without a host sync.

    Args:
        frames: 1-D uint8 tensors of ``framed(length)`` elements, aligned to 8 bytes.
        lengths: expected size of each message in bytes.

    Returns:
        For each frame, INTACT or the first that applies of OTHER_VERSION, OTHER_LENGTH and DAMAGED.
        For frames that the host cannot read, this is a uint8 tensor on their device.
    """
    if host.can_read(frames[0]):
        return [_inspect(frame, length) for frame, length in zip(frames, lengths, strict=True)]
    words = _rows(frames)
    expected: int | Tensor = _signature(lengths[0])
    if len(set(lengths)) > 1:
        signatures = torch.tensor([_signature(length) for length in lengths])
        expected = host.copy_to(signatures, words.device)
    # The comparisons of `_inspect` without a branch on a value, which would wait for the device.
    # The last `where` takes precedence.
    found = torch.where(words[:, 1] == _checksums(words), INTACT, DAMAGED)
    found = torch.where(words[:, 0] == expected, found, OTHER_LENGTH)
    return torch.where(words[:, 0] & 255 == VERSION, found, OTHER_VERSION).to(torch.uint8)


def _inspect(frame: Tensor, length: int) -> int:
    header = frame.view(torch.int64).numpy()
    if header[0] & 255 != VERSION:
        return OTHER_VERSION
    if header[0] != _signature(length):
        return OTHER_LENGTH
    return INTACT if header[1] == _checksum(header) else DAMAGED


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


def _checksums(words: Tensor) -> Tensor:
    """Return the checksum of each row of words, on their device."""
    # Sums of int64 wrap around here as well.
    weights = torch.arange(1, 2 * words.shape[1], 2, device=words.device)
    weights[1:2].fill_(0)
    return (words * weights).sum(1)


def _rows(frames: Sequence[Tensor]) -> Tensor:
    """Return frames as the rows of a matrix of words, filled up with zeros."""
    first, size = frames[0], max(frame.numel() for frame in frames)
    begin, storage = first.storage_offset(), first.untyped_storage().data_ptr()
    if all(
        frame.numel() == size
        and frame.storage_offset() == begin + i * size
        and frame.untyped_storage().data_ptr() == storage
        for i, frame in enumerate(frames)
    ):
        # Equal frames, as a collective returns them: no copy.
        return first.as_strided((len(frames), size), (size, 1)).view(torch.int64)
    # Zeros do not change a checksum.
    zeros = first.new_zeros(size)
    filled = [part for frame in frames for part in (frame, zeros[frame.numel() :])]
    return torch.cat(filled).view(len(frames), -1).view(torch.int64)


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
