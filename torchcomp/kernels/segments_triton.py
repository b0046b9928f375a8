"""Segments: several messages or vectors that one launch of a Triton kernel handles together.

A segment is a tuple (start, n, k): k of the n elements from position `start` on. What a kernel
needs to know of each segment is a row of a table on the device. The first column of every table is
the segment's first program.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
import triton.language as tl
from torch import Tensor

from torchcomp import host
from torchcomp.kernels.triton_jit import kernel

Segment = tuple[int, int, int]
Rows = tuple[tuple[int, ...], ...]


def table(
    make: Callable[..., tuple[Rows, int]], device: torch.device, *columns: Sequence[object]
) -> tuple[Tensor, int]:
    """Return the rows that ``make(*columns)`` describes, on a device, and the number of programs.

    `make` must be a pure function: what it returns for equal columns is kept.
    """
    rows, programs = _rows(make, *map(tuple, columns))
    return host.copy_to(rows, device), programs


# Every bucket of every step needs its tables. Kept on the CPU: kept on the device, a table could be
# read on another stream before the copy to it has ended.
@lru_cache(maxsize=1024)
def _rows(make: Callable[..., tuple[Rows, int]], *columns: object) -> tuple[Tensor, int]:
    rows, programs = make(*columns)
    return torch.tensor(rows, dtype=torch.int64), programs


@kernel("rows")
def row_of(program: tl.tensor, table: tl.tensor, rows: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Return a pointer to the row of the segment that a program works on, by binary search."""
    below, above = 0, rows
    while above - below > 1:
        middle = (below + above) // 2
        later = tl.load(table + middle * WIDTH) > program
        above = tl.where(later, middle, above)
        below = tl.where(later, below, middle)
    return table + below * WIDTH
