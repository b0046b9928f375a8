"""Pieces: a bucket cut into equal parts, one for each rank of a node.

Each parameter is cut along its first dimension, as FSDP2 shards it: of n rows on L ranks, rank r
has rows r c to (r + 1) c with c = ceil(n / L), and zeros where there are no such rows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

import torch
from torch import Tensor

from torchcomp.engine.bucket import BucketShape


@dataclass(frozen=True)
class Chunk:
    """How one parameter is cut. A row is one index of the first dimension."""

    name: str
    row: tuple[int, ...]  # shape of a row
    rows: int  # rows of the parameter
    each: int  # rows of a piece, including rows of zeros
    start: int  # first element of the parameter within a piece
    stride: tuple[int, ...]  # of the parameter's piece
    by_rows: bool  # False if the parameter is cut as a vector, in the order of its memory

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.each, *self.row)

    @property
    def span(self) -> slice:
        return slice(self.start, self.start + prod(self.shape))


@dataclass(frozen=True)
class Pieces:
    """The pieces of a bucket."""

    whole: BucketShape
    ranks: int  # number of pieces, L

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """How each parameter is cut, in the order of the bucket."""
        chunks, start = [], 0
        strides = self.whole.strides or ((),) * len(self.whole.names)
        for name, shape, stride in zip(self.whole.names, self.whole.shapes, strides, strict=True):
            # Strides are empty if the parameter is contiguous.
            rows_follow = not stride or shape[0] <= 1 or stride[0] == prod(shape[1:])
            by_rows = len(shape) > 0 and rows_follow
            rows, *row = shape if by_rows else (prod(shape),)
            inner = stride[1:] if stride else torch.empty((0, *row), device="meta").stride()[1:]
            strides_of = (prod(row), *inner[: len(row)])
            each = ceil(rows / self.ranks)
            chunks.append(Chunk(name, tuple(row), rows, each, start, strides_of, by_rows))
            start = chunks[-1].span.stop
        return tuple(chunks)

    @cached_property
    def piece(self) -> BucketShape:
        """The shape of one piece, the same for all ranks."""
        shapes = tuple(chunk.shape for chunk in self.chunks)
        strides = tuple(chunk.stride for chunk in self.chunks) if self.whole.strides else ()
        return BucketShape(self.whole.names, shapes, self.whole.dtype, strides)

    def like(self, parameter: Tensor) -> Tensor:
        """Return a view of a parameter like its piece, with values that have no meaning."""
        (chunk,) = self.chunks
        return parameter.detach().as_strided(chunk.shape, chunk.stride)

    def cut(self, parts: Mapping[str, Tensor], out: Tensor) -> Tensor:
        """Copy a bucket, each parameter's part 1-D, to `out`, all pieces 1-D, and return it."""
        self._copy(parts, out, cut=True)
        return out

    def join(self, pieces: Tensor, parts: Mapping[str, Tensor]) -> None:
        """Copy pieces (all, in rank order, of any dtype) to a bucket; the inverse of `cut`."""
        self._copy(parts, pieces, cut=False)

    def _copy(self, parts: Mapping[str, Tensor], pieces: Tensor, *, cut: bool) -> None:
        of_parts, of_pieces, padding = list[Tensor](), list[Tensor](), list[Tensor]()
        for chunk in self.chunks:
            part, placed = parts[chunk.name], pieces.view(self.ranks, -1)[:, chunk.span]
            size = placed.shape[1]
            full = chunk.rows // max(chunk.each, 1)  # pieces without padding
            rest = part[full * size :]
            if full:
                of_parts.append(part[: full * size].view(full, size))
                of_pieces.append(placed[:full])
            if rest.numel():
                of_parts.append(rest)
                of_pieces.append(placed[full, : rest.numel()])
                padding.append(placed[full, rest.numel() :])
                full += 1
            if full < self.ranks and size:
                padding.append(placed[full:])
        if of_parts:  # none if all parameters are empty
            torch._foreach_copy_(*((of_pieces, of_parts) if cut else (of_parts, of_pieces)))
        if padding and cut:
            torch._foreach_zero_(padding)


def pieces_of(shapes: Iterable[BucketShape], ranks: int) -> list[BucketShape]:
    """Return the shape of a piece of each bucket; of one rank, the whole bucket."""
    return [shape if ranks == 1 else Pieces(shape, ranks).piece for shape in shapes]
