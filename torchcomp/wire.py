"""Wire: the static byte layout of a message.

A message is the concatenation of its fields, each a C-contiguous little-endian array, without
padding and without a header. The layout follows from the number of elements and the dtype alone,
never from the values, so the receiver knows every size beforehand and no sizes are exchanged.
:func:`nbytes` is the only source of every ratio, plan, table and test.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

VERSION = 1
"""Changes whenever the bytes of any message change; ranks compare it when they register."""


@dataclass(frozen=True)
class Field:
    """One array of a message.

    Attributes:
        name: what it holds, for documentation and errors.
        dtype: element type on the wire.
        count: number of elements.
    """

    name: str
    dtype: torch.dtype
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes that the field takes in a message."""
        return self.count * self.dtype.itemsize


Layout = tuple[Field, ...]
Parts = tuple[Tensor, ...]


def nbytes(layout: Layout) -> int:
    """Bytes of a message with this layout."""
    return sum(field.nbytes for field in layout)


def index_dtype(numel: int) -> torch.dtype:
    """The narrowest unsigned (or, past 2 bytes, signed) integer that addresses `numel` elements."""
    if numel <= 2**16:
        return torch.uint16
    return torch.int32 if numel <= 2**31 else torch.int64


def pack(parts: Sequence[Tensor], layout: Layout, out: Tensor) -> None:
    """Write the fields of one message into `out`, a uint8 tensor of ``nbytes(layout)`` elements.

    Raises:
        ValueError: if a part is not what the layout announces.
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

    Args:
        message: 1-D uint8 tensor of ``nbytes(layout)`` elements.
        layout: as announced by the compressor.

    Raises:
        ValueError: if the message has another length.
    """
    if message.numel() != nbytes(layout):
        raise ValueError(
            f"a message of {message.numel()} bytes does not fit a layout of {nbytes(layout)} bytes"
        )
    spans = zip(layout, _extents(layout), strict=True)
    return tuple(_typed(message[start:stop], field.dtype) for field, (start, stop) in spans)


def _typed(raw: Tensor, dtype: torch.dtype) -> Tensor:
    aligned = raw.storage_offset() % dtype.itemsize == 0
    return (raw if aligned else raw.clone()).view(dtype)


def _extents(layout: Layout) -> Iterator[tuple[int, int]]:
    start = 0
    for field in layout:
        yield start, start + field.nbytes
        start += field.nbytes
