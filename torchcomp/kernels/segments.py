"""Segments: parts of a vector of which entries are chosen and sent separately.

Entries are stored flat, one segment after another.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
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


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate 1-D tensors of one dtype. One alone is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


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
