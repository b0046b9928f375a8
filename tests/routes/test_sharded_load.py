"""Bytes of a sharded exchange: the closed form against a sum over all owners."""

import math
from fractions import Fraction
from itertools import product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchcomp.compressors import Cast, Identity, Quantize, RandK, TopK
from torchcomp.engine.bucket import BucketShape
from torchcomp.exchange.traffic import Load
from torchcomp.routes import wire
from torchcomp.routes.codec import nbytes_of
from torchcomp.routes.searches import search_load
from torchcomp.routes.sharded_load import sharded_load
from torchcomp.routes.shards import direction

SELECTING = [TopK(0.1), TopK(k=3, scope="tensor"), TopK(0.5, scope="tensor", values="int4")]
OTHERS = [Identity(), Cast("bf16"), Quantize("int8"), RandK(0.3, scope="tensor")]


def framed(vectors):
    """The bytes of a frame of these vectors."""
    return wire.framed(nbytes_of(vectors)) if nbytes_of(vectors) else 0


def frames(each):
    """The expected bytes of every owner's frame."""
    if not each.exact:
        return [framed(vectors) for vectors in each.fixed]
    sizes = each.sizes
    return [
        expected_frame(
            each,
            owner,
            [Fraction(each.kept[p.vector] * (p.stop - p.start), sizes[p.vector]) for p in pieces],
        )
        for owner, pieces in enumerate(each.pieces)
    ]


def expected_frame(each, owner, entries):
    """The expected bytes of one frame, for the expected number of entries of each piece."""
    if all(number >= 1 for number in entries):
        return framed(each.counted(owner, [int(number) for number in entries]))
    nbytes = Fraction(0)
    for i, number in enumerate(entries):
        alone = [0] * len(entries)
        alone[i] = max(1, int(number))
        nbytes += min(1, number) * nbytes_of(each.counted(owner, alone))
    sent = min(1, max(entries))  # the share of the steps with a frame
    return sent * wire.framed(math.ceil(nbytes / sent))


def crossing(node, ranks, sent):
    """The bytes that a node's ranks send to others, and receive, of ``sent(sender, receiver)``."""
    others = [rank for rank in range(ranks) if rank not in node]
    pairs = list(product(node, others))
    return Load(
        sent=round(sum(sent(rank, other) for rank, other in pairs)),
        received=round(sum(sent(other, rank) for rank, other in pairs)),
    )


def listed_load(up, down, node):
    """The load of a node's ranks, from the codecs that a run uses."""
    uplink, downlink, ranks = frames(up), frames(down), up.world_size
    load = crossing(node, ranks, lambda _, owner: uplink[owner])
    load.add(crossing(node, ranks, lambda owner, _: downlink[owner]))
    if up.exact:
        load.add(crossing(node, ranks, lambda _, owner: 4 * len(up.pieces[owner])))
    if down.exact:
        vectors = [
            (sum(counts[rank] for rank in node), sum(counts), k)
            for counts, k in zip(down.candidates, down.kept, strict=True)
        ]
        itemsize = max(4, down.shape.dtype.itemsize)
        load.add(search_load(vectors, itemsize, ranks, len(node)))
    return load


sizes = st.lists(st.integers(0, 40) | st.sampled_from([64, 1000]), max_size=8)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    sizes,
    st.integers(1, 70),
    st.sampled_from([*SELECTING, *OTHERS]),
    st.sampled_from([*SELECTING, *OTHERS]),
    st.sampled_from(["exact", "shard"]),
    st.sampled_from([torch.float32, torch.float64, torch.float16]),
    st.data(),
)
def test_the_closed_form_is_the_sum_over_the_owners(
    sizes, world_size, up, down, selection, dtype, data
):
    names = tuple(f"p{i}" for i in range(len(sizes)))
    shape = BucketShape(names, tuple((size,) for size in sizes), dtype)
    if selection == "exact" and not (up.selects or up.elementwise):
        selection = "shard"
    rank = data.draw(st.integers(0, world_size - 1))
    size = data.draw(st.sampled_from([n for n in range(1, world_size + 1) if world_size % n == 0]))
    node = range(rank - rank % size, rank - rank % size + size)
    ways = [
        direction(role, each, selection, shape, world_size)
        for role, each in (("up", up), ("down", down))
    ]
    assert sharded_load(*ways, rank, size) == listed_load(*ways, node)


def test_fewer_entries_than_shards_send_what_random_entries_send_on_average():
    """One entry of 1,000, in one of 10 shards: 9 times of 10 another rank owns it."""
    shape = BucketShape(("a",), ((1000,),), torch.float32)
    entry = direction("up", TopK(k=1), "exact", shape, 10)
    empty = direction("down", Identity(), "shard", shape, 10)
    sent = sharded_load(entry, empty, 0).sent - sharded_load(empty, empty, 0).sent
    counts = 4 * 9  # which shards get how many entries, as int32
    dense = 9 * wire.framed(400)
    frame = framed(entry.counted(0, [1]))
    assert sent == counts + round(0.9 * frame) - dense


def test_an_empty_bucket_sends_nothing():
    shape = BucketShape((), (), torch.float32)
    way = direction("up", Identity(), "shard", shape, 5)
    assert sharded_load(way, way, 0) == Load()
    assert wire.framed(0) > 0, "a frame has a header, but an empty message has no frame"
