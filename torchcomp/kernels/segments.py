"""Segments: parts of a vector of which entries are chosen and sent separately.

The forms for accelerators handle all segments of a call at once, to launch few kernels. Entries are
stored flat, one segment after another.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchcomp.engine import host
from torchcomp.routes.wire import Frames

TOGETHER = 2**22
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


def runs(segments: Sequence[Segment]) -> list[slice]:
    """Cut a list of segments into runs in which they ascend and do not overlap."""
    pairs = enumerate(pairwise(segments), 1)
    cuts = [at for at, (before, after) in pairs if after.start < before.start + before.n]
    return [slice(*ends) for ends in pairwise([0, *cuts, len(segments)])]


def starts(counts: Sequence[int]) -> list[int]:
    """Return the sums of all earlier counts: 0, counts[0], counts[0] + counts[1], ..."""
    return [0, *accumulate(counts)][:-1]


def shape_of(counts: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a tensor of all entries: a matrix if all segments have equally many."""
    return (len(counts), counts[0]) if len(set(counts)) == 1 else (sum(counts),)


def spread(
    counts: Sequence[int], device: torch.device, *columns: Sequence[int]
) -> list[Tensor | int]:
    """Spread numbers of segments over their entries, with one copy to the device."""
    even = [len(set(column)) == 1 for column in columns]
    uneven = [column for column, alike in zip(columns, even, strict=True) if not alike]
    rows: Iterator[Tensor] = iter(())
    if uneven and len(set(counts)) == 1:
        rows = iter(host.copy_to(torch.tensor(uneven), device)[:, :, None])
    elif uneven:
        table = host.copy_to(torch.tensor([counts, *uneven]), device)
        # With the size of the result, the host does not have to read the counts.
        segment = torch.repeat_interleave(table[0], output_size=sum(counts))
        rows = iter(table[1:].index_select(1, segment))
    return [c[0] if alike else next(rows) for c, alike in zip(columns, even, strict=True)]


def line(
    counts: Sequence[int], device: torch.device, step: Tensor | int, offset: Tensor | int
) -> Tensor | int:
    """Return ``offset + step * i`` for each entry i of all segments, counted from 0."""
    total, shape = sum(counts), shape_of(counts)
    if isinstance(step, Tensor):
        return torch.arange(total, device=device).view(shape) * step + offset
    if not step:
        return offset
    # As far as possible in the one kernel of `arange`.
    begin = 0 if isinstance(offset, Tensor) else offset
    grown = torch.arange(begin, begin + total * step, step, device=device).view(shape)
    return grown + offset if isinstance(offset, Tensor) else grown


def add(x: Tensor, offset: Tensor | int) -> Tensor:
    """Return ``x + offset``, without a kernel if that is `x`."""
    return x if isinstance(offset, int) and not offset else x + offset


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


def batches(counts: Sequence[int], most: int) -> Iterator[slice]:
    """Cut a list of items into runs of at most `most` in sum of their counts, or one item."""
    start, total = 0, 0
    for stop, count in enumerate(counts):
        if stop > start and total + count > most:
            yield slice(start, stop)
            start, total = stop, 0
        total += count
    if start < len(counts):
        yield slice(start, len(counts))


def digit_bits(vectors: int) -> int:
    """Return how many bits a search decides in a round: histograms of many vectors are small."""
    return 8 if vectors <= 8 else 4
