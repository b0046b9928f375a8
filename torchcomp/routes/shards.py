"""Shards: how the vectors of a bucket are cut among the owners of its shards."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch

from torchcomp.compressors import Compressor
from torchcomp.compressors.base import Vector
from torchcomp.engine.bucket import BucketShape, Shard
from torchcomp.kernels.segments import Segment
from torchcomp.routes import wire
from torchcomp.routes.codec import Codec, vectors_of


class Piece(NamedTuple):
    """The elements of one vector that belong to one shard."""

    vector: int  # index of the vector in the bucket's codec
    name: str  # names the vector and the start of the piece; part of the key
    place: Segment  # in the shard, with the most entries that its owner can contribute


@dataclass(frozen=True)
class Direction:
    """How a bucket's shards are encoded for the uplink or the downlink; computed once.

    Lists are by owner or by vector of the whole bucket.
    """

    role: str  # "up" or "down"; part of the key, so that the two draw different random numbers
    compressor: Any  # a Compressor; if `exact` and not dense, with the methods of TopK
    exact: bool  # whether entries are selected from whole vectors of the bucket
    shape: BucketShape  # shape of the bucket, with the dtype of the values on the wire
    world_size: int

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        return self.shape.shards(self.world_size)

    @cached_property
    def whole(self) -> tuple[Vector, ...]:
        """The vectors of the whole bucket."""
        return vectors_of(self.compressor, self.shape.names, self.shape.sizes, self.shape.dtype)

    @cached_property
    def fixed(self) -> list[tuple[Vector, ...]]:
        """By owner, the vectors of a shard that is compressed separately."""
        # The names are part of the key. Two shards of one parameter then draw different numbers.
        return [
            vectors_of(
                self.compressor,
                tuple(f"{self.role} {name} from {part.start}" for name in part.names),
                part.sizes,
                self.shape.dtype,
            )
            for part in self.shards
        ]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(vector.span.stop - vector.span.start for vector in self.whole)

    @cached_property
    def kept(self) -> list[int]:
        """By vector, the number of entries to keep."""
        return [self.compressor.kept(size) for size in self.sizes]

    @cached_property
    def pieces(self) -> list[list[Piece]]:
        """By owner, the pieces of the bucket's vectors in that owner's shard."""
        cut: list[list[Piece]] = []
        for part in self.shards:
            cut.append([])
            for i, vector in enumerate(self.whole):
                start, stop = max(vector.span.start, part.start), min(vector.span.stop, part.stop)
                if start < stop:
                    # The k largest of a vector can all be in one shard, but none needs more than k.
                    most = min(self.kept[i], stop - start)
                    name = f"{self.role} {vector.name} from {part.start}"
                    place = Segment(start - part.start, stop - start, most)
                    cut[-1].append(Piece(i, name, place))
        return cut

    @cached_property
    def candidates(self) -> list[list[int]]:
        """By vector and owner, the number of candidates for the search."""
        table = [[0] * self.world_size for _ in self.whole]
        for owner, pieces in enumerate(self.pieces):
            for piece in pieces:
                table[piece.vector][owner] = piece.place.k
        return table

    @cached_property
    def searched(self) -> list[bool]:
        """By vector, whether its entries are chosen among the candidates of several owners."""
        return [k < sum(each) for k, each in zip(self.kept, self.candidates, strict=True)]

    def place(self, vector: int, owner: int) -> Segment:
        """Return what an owner has of a vector, and how many entries all owners keep of it."""
        found = [p.place[:2] for p in self.pieces[owner] if p.vector == vector]
        return Segment(*(found or [(0, 0)])[0], self.kept[vector])

    def places(self, owner: int, in_bucket: bool) -> list[Segment]:
        """Return the pieces of a shard, there or in the bucket, with the most entries of each."""
        start = self.shards[owner].start if in_bucket else 0
        return [Segment(start + at, n, k) for _, _, (at, n, k) in self.pieces[owner]]

    @cached_property
    def signatures(self) -> list[int]:
        """By owner, what the signature of a message with counted entries begins with."""
        return [
            wire.signature(sum((v.layout for v in self.counted(o, [1] * len(p))), ())) >> 1
            for o, p in enumerate(self.pieces)
        ]

    def codec(self, device: torch.device, checksum: bool) -> Codec:
        """Return the codec of :attr:`fixed` vectors of the bucket, with a frame for each owner."""
        vectors = [
            v for part, own in zip(self.shards, self.fixed, strict=True) for v in _in(part, own)
        ]
        return Codec(vectors, device, self.shape.dtype, [len(own) for own in self.fixed], checksum)

    def counted(
        self, owner: int, counts: Sequence[int], in_bucket: bool = False
    ) -> tuple[Vector, ...]:
        """Return the vectors of a shard, there or in the bucket, with `counts` entries."""
        vectors = []
        for (_, name, place), count in zip(self.pieces[owner], counts, strict=True):
            if count:  # a compressor keeps at least one entry, so an empty piece has no vector
                exactly = self.compressor.exactly(count)
                layout = exactly.layout(place.n, self.shape.dtype)
                vectors.append(Vector(name, place.span, exactly, layout))
        return _in(self.shards[owner], vectors) if in_bucket else tuple(vectors)


def _in(part: Shard, vectors: Sequence[Vector]) -> tuple[Vector, ...]:
    """Return vectors of a shard as vectors of the bucket."""
    start = part.start
    return tuple(replace(v, span=slice(start + v.span.start, start + v.span.stop)) for v in vectors)


@lru_cache(maxsize=1024)
def direction(
    role: str, compressor: Compressor, selection: str, shape: BucketShape, world_size: int
) -> Direction:
    """Return the direction with this role, "up" or "down"."""
    # An elementwise compressor gives the same result for shards as for the whole bucket.
    exact = selection == "exact" and compressor.selects
    return Direction(role, compressor, exact, shape, world_size)
