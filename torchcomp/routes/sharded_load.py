"""Bytes of a sharded exchange, computed without listing its owners.

Most shards lie inside one vector, and their lengths differ by at most 1: they are counted together.
The cost of a computation depends on the number of vectors, and not on the number of ranks.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

from torchcomp.engine.bucket import cut
from torchcomp.exchange.traffic import Load, gathered
from torchcomp.routes import wire
from torchcomp.routes.searches import search_load
from torchcomp.routes.shards import Direction

Pieces = tuple[tuple[int, int], ...]
"""What a shard contains: index of a vector, and number of its elements; none of them empty."""


def sharded_load(up: Direction, down: Direction, rank: int, node: int = 1) -> Load:
    """Return the bytes of one bucket per step; an estimate for exact selections."""
    ranks, first = up.world_size, rank - rank % node
    own, others = range(first, first + node), ranks - node
    up_all, up_own = (_total(_frames(up, owners)) for owners in (range(ranks), own))
    load = Load(sent=round(node * (up_all - up_own)), received=round(others * up_own))
    load.add(_down_load(down, own))
    if up.exact:  # the counts, which are int32
        pieces, mine = (_pieces_of(up, owners) for owners in (range(ranks), own))
        load.add(Load(sent=4 * node * (pieces - mine), received=4 * others * mine))
    if down.exact:
        total, owned = (_candidates(down, owners) for owners in (range(ranks), own))
        # `order_bits` makes candidates of at least 4 bytes, also from 16-bit values.
        itemsize = max(4, down.shape.dtype.itemsize)
        load.add(search_load(zip(owned, total, down.kept, strict=True), itemsize, ranks, node))
    return load


def _down_load(down: Direction, own: range) -> Load:
    """Return the bytes of the all-gather of the downlink messages, for the ranks `own`."""
    frames, node = _frames(down, range(down.world_size)), len(own)
    if len(frames) == 1 and not down.exact:  # see sharded.py
        moved = gathered(int(*frames), down.world_size, node)
        return Load(sent=moved, received=moved)
    owned = _total(_frames(down, own))
    return Load(
        sent=round((down.world_size - node) * owned),
        received=round(node * (_total(frames) - owned)),
    )


def _frames(direction: Direction, owners: range) -> "Counter[Fraction]":
    """Return the bytes of the frames of some owners' shards, and how many frames have them."""
    frames = Counter[Fraction]()
    for shard, count in _shards(direction.sizes, direction.world_size, owners).items():
        frames[_frame(direction, shard)] += count
    return frames


def _total(frames: "Counter[Fraction]") -> Fraction:
    return sum((nbytes * count for nbytes, count in frames.items()), Fraction(0))


def _pieces_of(direction: Direction, owners: range) -> int:
    """Return the number of pieces of the bucket's vectors in some owners' shards."""
    shards = _shards(direction.sizes, direction.world_size, owners)
    return sum(len(shard) * count for shard, count in shards.items())


def _frame(direction: Direction, shard: Pieces) -> Fraction:
    """Return the expected bytes of a shard's frame; if `exact`, for evenly spread entries."""
    nbytes, steps = Fraction(0), Fraction(0)
    for vector, size in shard:
        encoder, share = direction.compressor, Fraction(1)
        if direction.exact:
            expected = Fraction(direction.kept[vector] * size, direction.sizes[vector])
            encoder, share = direction.selector.exactly(max(1, int(expected))), min(share, expected)
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
    """Return the contents of some consecutive owners' shards, and how many shards have the same."""
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
