"""Bytes of a sharded exchange, computed without listing its owners.

Most shards lie inside one vector, and their lengths differ by at most 1: they are counted together.
The cost of a computation depends on the number of vectors, and not on the number of ranks.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

from torchcomp.engine.bucket import cut
from torchcomp.exchange.traffic import Load, gathered
from torchcomp.routes import wire
from torchcomp.routes.searches import search_load
from torchcomp.routes.shards import Direction

Pieces = tuple[tuple[int, int], ...]
"""What a shard contains: index of a vector, and number of its elements."""


def sharded_load(up: Direction, down: Direction, rank: int, node: int = 1) -> Load:
    """Return the bytes of one bucket per step; an estimate for exact selections."""
    ranks, first = up.world_size, rank - rank % node
    every, mine, others = range(ranks), range(first, first + node), ranks - node

    def both(direction: Direction, of: Callable[[Pieces], Any]) -> list[Any]:
        """Return the sums of a number of each shard over all owners, and over those of the node."""
        shards = (_shards(direction.sizes, ranks, owners) for owners in (every, mine))
        return [sum(of(shard) * count for shard, count in each.items()) for each in shards]

    total, own = both(up, partial(_frame, up))
    load = Load(sent=round(node * (total - own)), received=round(others * own))
    if up.exact:  # the counts, which are int32
        total, own = both(up, len)
        load.add(Load(sent=4 * node * (total - own), received=4 * others * own))
    sizes = {_frame(down, shard) for shard in _shards(down.sizes, ranks, every)}
    if len(sizes) == 1 and not down.exact:  # see sharded.py
        moved = gathered(int(*sizes), ranks, node)
        load.add(Load(sent=moved, received=moved))
    else:
        total, own = both(down, partial(_frame, down))
        load.add(Load(sent=round(others * own), received=round(node * (total - own))))
    if down.exact:
        candidates = (_candidates(down, owners) for owners in (mine, every))
        # `order_bits` makes candidates of at least 4 bytes, also from 16-bit values.
        itemsize = max(4, down.shape.dtype.itemsize)
        load.add(search_load(zip(*candidates, down.kept, strict=True), itemsize, ranks, node))
    return load


def _frame(direction: Direction, shard: Pieces) -> Fraction:
    """Return the expected bytes of a shard's frame; if `exact`, for evenly spread entries."""
    nbytes, steps = Fraction(0), Fraction(0)
    for vector, size in shard:
        encoder, share = direction.compressor, Fraction(1)
        if direction.exact:
            expected = Fraction(direction.kept[vector] * size, direction.sizes[vector])
            encoder, share = encoder.exactly(max(1, int(expected))), min(share, expected)
        nbytes += share * wire.nbytes(encoder.layout(size, direction.shape.dtype))
        steps = max(steps, share)  # in which there is a frame
    return steps * wire.framed(math.ceil(nbytes / steps)) if steps else steps


def _candidates(down: Direction, owners: range) -> list[int]:
    """Return the number of candidates that some owners contribute, by vector."""
    counts = [0] * len(down.kept)
    for shard, count in _shards(down.sizes, down.world_size, owners).items():
        for vector, size in shard:
            # As in `Direction.candidates`, at most k of each owner.
            counts[vector] += count * min(down.kept[vector], size)
    return counts


@lru_cache(maxsize=1024)
def _shards(sizes: tuple[int, ...], world_size: int, owners: range) -> Counter[Pieces]:
    """Return the contents of consecutive owners' shards, and how many shards have the same."""
    ends, numel, shards = list(accumulate(sizes)), sum(sizes), Counter[Pieces]()
    if not numel:
        return Counter({(): len(owners)})
    short, owner = numel // world_size, owners.start
    while owner < owners.stop:
        start = cut(numel, world_size, owner)
        end = ends[bisect_right(ends, start)]  # of the vector in which this shard begins
        # The first owner whose shard ends after it: the smallest r with cut(r + 1) > end.
        after = min(owners.stop, ((end + 1) * world_size - 1) // numel)
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
