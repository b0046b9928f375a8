"""Bytes of a sharded exchange, computed without listing its owners.

Most shards lie inside one vector of the bucket, and their lengths differ by at most 1. They are
counted together. Only shards with parts of several vectors are looked at one by one. The cost of
a computation therefore depends on the number of vectors, and not on the number of ranks.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

from torchcomp import wire
from torchcomp.bucket import cut
from torchcomp.routes.sharded import Direction
from torchcomp.routes.threshold import search_load
from torchcomp.traffic import Load

Pieces = tuple[tuple[int, int], ...]
"""What a shard contains: index of a vector, and number of its elements; none of them empty."""


def sharded_load(up: Direction, down: Direction, rank: int) -> Load:
    """Return the bytes of one bucket per rank and step; an estimate for exact selections."""
    others = up.world_size - 1
    up_all, up_own = _framed(up, rank)
    down_all, down_own = _framed(down, rank)
    load = Load(
        sent=round(up_all - up_own + others * down_own),
        received=round(others * up_own + down_all - down_own),
    )
    if up.exact:  # the counts, which are int32
        owned = len(_own(up.sizes, up.world_size, rank))
        pieces = sum(len(shard) * n for shard, n in _shards(up.sizes, up.world_size).items())
        load.add(Load(sent=4 * (pieces - owned), received=4 * others * owned))
    if down.exact:
        load.add(_search_load(down, rank))
    return load


def _framed(direction: Direction, rank: int) -> tuple[Fraction, Fraction]:
    """Return the bytes of the frames of all shards together, and of the shard of `rank`."""
    shards = _shards(direction.sizes, direction.world_size)
    total = sum((_frame(direction, shard) * count for shard, count in shards.items()), Fraction(0))
    return total, _frame(direction, _own(direction.sizes, direction.world_size, rank))


def _frame(direction: Direction, shard: Pieces) -> Fraction:
    """Return the bytes of a shard's frame. If `exact`, assume an even spread of the entries.

    A piece that expects less than one entry counts as one entry in that share of the steps.
    """
    nbytes, steps = Fraction(0), Fraction(0)
    for vector, size in shard:
        encoder, share = direction.compressor, Fraction(1)
        if direction.exact:
            expected = Fraction(direction.kept[vector] * size, direction.sizes[vector])
            encoder, share = direction.selector.exactly(max(1, int(expected))), min(share, expected)
        nbytes += share * wire.nbytes(encoder.layout(size, direction.shape.dtype))
        steps = max(steps, share)  # in which there is a frame
    return steps * wire.framed(math.ceil(nbytes / steps)) if steps else steps


def _search_load(down: Direction, rank: int) -> Load:
    """Return the bytes of the search for the threshold of an exact downlink."""
    kept, owned = down.kept, dict(_own(down.sizes, down.world_size, rank))
    total = [0] * len(kept)
    for shard, count in _shards(down.sizes, down.world_size).items():
        for vector, size in shard:
            # As in `Direction.candidates`, at most k of each owner.
            total[vector] += count * min(kept[vector], size)
    vectors = [(min(k, owned.get(i, 0)), total[i], k) for i, k in enumerate(kept)]
    # `order_bits` makes candidates of at least 4 bytes, also from 16-bit values.
    return search_load(vectors, max(4, down.shape.dtype.itemsize), down.world_size)


def _own(sizes: tuple[int, ...], world_size: int, rank: int) -> Pieces:
    """Return the contents of one rank's shard of a bucket with vectors of these sizes."""
    start, stop = (cut(sum(sizes), world_size, each) for each in (rank, rank + 1))
    return _pieces(list(accumulate(sizes)), start, stop)


@lru_cache(maxsize=1024)
def _shards(sizes: tuple[int, ...], world_size: int) -> Counter[Pieces]:
    """Return the contents of the shards, and how many shards have the same."""
    ends, numel, owner, shards = list(accumulate(sizes)), sum(sizes), 0, Counter[Pieces]()
    if not numel:
        return Counter({(): world_size})
    short = numel // world_size
    while owner < world_size:
        start = cut(numel, world_size, owner)
        end = ends[bisect_right(ends, start)]  # of the vector in which this shard begins
        # The first owner whose shard ends after it: the smallest r with cut(r + 1) > end.
        after = min(world_size, ((end + 1) * world_size - 1) // numel)
        if after == owner:  # the shard has parts of several vectors
            after += 1
            shards[_pieces(ends, start, cut(numel, world_size, after))] += 1
        else:
            long = cut(numel, world_size, after) - start - short * (after - owner)
            shards[_pieces(ends, start, start + short)] += after - owner - long
            shards[_pieces(ends, start, start + short + 1)] += long
        owner = after
    return +shards  # without those that occur 0 times


def _pieces(ends: Sequence[int], start: int, stop: int) -> Pieces:
    """Return the contents of [start, stop), for vectors that end at `ends`."""
    pieces = []
    for vector in range(bisect_right(ends, start), len(ends)):
        if start < min(ends[vector], stop):
            pieces.append((vector, min(ends[vector], stop) - start))
            start = ends[vector]
        if start >= stop:
            break
    return tuple(pieces)
