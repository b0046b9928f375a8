"""Segments: parts of a vector of which entries are chosen and sent separately.

The forms for accelerators handle all segments of a call at once: the number of kernels that they
launch does not grow with the number of segments. Entries are stored flat, one segment after
another, in the order of the segments.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from torchcomp import host


class Segment(NamedTuple):
    """A part of a vector, and how many of its entries are sent."""

    start: int  # first element within the vector
    n: int  # number of elements
    k: int  # number of entries

    @property
    def span(self) -> slice:
        """The segment's elements within the vector."""
        return slice(self.start, self.start + self.n)


def starts(counts: Sequence[int]) -> list[int]:
    """Return the sums of all earlier counts: 0, counts[0], counts[0] + counts[1], ..."""
    return [0, *accumulate(counts)][:-1]


def spread(
    counts: Sequence[int], device: torch.device, *columns: Sequence[int]
) -> list[Tensor | int]:
    """Return numbers of segments as one value for each of their entries.

    Args:
        counts: number of entries of each segment.
        device: device of the result.
        columns: each has one number for each segment.

    Returns:
        For each column, 1-D int64 with one element for each entry; or a number, if the numbers of
        all segments are equal.
    """
    uneven = [column for column in columns if len(set(column)) > 1]
    rows = iter(())
    if uneven:
        # One copy for all columns.
        table = host.copy_to(torch.tensor([counts, *uneven]), device)
        # With the size of the result, the host does not have to read the counts.
        segment = torch.repeat_interleave(table[0], output_size=sum(counts))
        rows = iter(table[1:].index_select(1, segment))
    return [next(rows) if len(set(column)) > 1 else column[0] for column in columns]
