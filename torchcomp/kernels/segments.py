"""Segments: parts of a vector of which entries are chosen and sent separately.

Entries are stored flat, one segment after another.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchcomp.routes.wire import Frames, Parts

TOGETHER = 2**20
"""Number of values that are decoded at once, which limits the memory for it."""


class Segment(NamedTuple):
    """A part of a vector, and how many of its entries are sent."""

    start: int  # first element within the vector
    n: int  # number of elements
    k: int  # number of entries

    @property
    def span(self) -> slice:
        """The segment's elements within the vector."""
        return slice(self.start, self.start + self.n)


class Prepared(Protocol):
    """What kernels know of the vectors of a tensor. Only `frames` changes later."""

    segments: tuple[Segment, ...]
    device: torch.device
    dtype: torch.dtype  # to which values are rounded before they are encoded
    frames: Frames | None


def part(x: Tensor, segment: Segment) -> Tensor:
    """Return the segment's elements of a vector."""
    # A slice takes microseconds, and most buckets are one vector.
    return x if segment.n == x.numel() else x[segment.span]


def ascend(segments: Sequence[Segment]) -> bool:
    """Return whether each segment begins after the one before."""
    return all(after.start >= before.start + before.n for before, after in pairwise(segments))


def starts(counts: Sequence[int]) -> list[int]:
    """Return the sums of all earlier counts: 0, counts[0], counts[0] + counts[1], ..."""
    return [0, *accumulate(counts)][:-1]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate 1-D tensors of one dtype. Parts that are adjacent in memory are not copied."""
    first = parts[0]
    if len(parts) == 1:
        return first
    # The address of a tensor without memory is 0: that of a simulated device, for example.
    adjacent = first.data_ptr() and all(
        a.data_ptr() + a.nbytes == b.data_ptr() and a.is_contiguous() for a, b in pairwise(parts)
    )
    # Another tensor's memory can begin where that of the first one ends.
    storages = {part.untyped_storage().data_ptr() for part in parts} if adjacent else ()
    if len(storages) == 1 and parts[-1].is_contiguous():
        return first.as_strided((sum(part.numel() for part in parts),), (1,))
    return torch.cat(list(parts))


def split(x: Tensor, counts: Sequence[int]) -> Sequence[Tensor]:
    """Split a tensor into parts of these lengths. One alone is not split."""
    # torch.split takes microseconds, and most buckets are one vector.
    return (x,) if len(counts) == 1 else torch.split(x, list(counts))


def stacked(rows: Sequence[Tensor]) -> Tensor:
    """Return 1-D tensors of one length as rows. One alone is not copied."""
    return rows[0][None] if len(rows) == 1 else torch.stack(list(rows))


def batches(messages: Sequence[Sequence[Parts]], i: int, count: int) -> Iterator[list[Parts]]:
    """Yield segment `i`, of `count` values, of as many messages as memory allows."""
    many = max(TOGETHER // max(count, 1), 1)
    for first in range(0, len(messages), many):
        yield [message[i] for message in messages[first : first + many]]


def digit_bits(vectors: int) -> int:
    """Return how many bits a search decides in a round: histograms of many vectors are small."""
    return 8 if vectors <= 8 else 4
