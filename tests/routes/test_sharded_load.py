"""Bytes of a sharded exchange: the closed form against a sum over all owners."""

import math
from fractions import Fraction

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


def frames(way):
    """The expected bytes of every owner's frame, from the codecs that a run uses."""
    if not way.exact:
        return [wire.framed(nbytes_of(vectors)) for vectors in way.fixed]
    return [expected_frame(way, owner) for owner in range(way.world_size)]


def expected_frame(way, owner):
    """The expected bytes of a frame, if the entries are spread evenly."""
    nbytes, sent = Fraction(0), Fraction(0)
    for i, piece in enumerate(way.pieces[owner]):
        number = Fraction(way.kept[piece.vector] * piece.place.n, way.sizes[piece.vector])
        alone = [max(1, int(number)) * (i == j) for j in range(len(way.pieces[owner]))]
        nbytes += min(1, number) * nbytes_of(way.counted(owner, alone))
        sent = max(sent, min(1, number))  # the share of the steps with a frame
    return sent * wire.framed(math.ceil(nbytes / sent)) if sent else sent


def listed_load(up, down, node):
    """The load of a node's ranks, as a sum over the other ranks."""
    ranks = up.world_size
    others = [rank for rank in range(ranks) if rank not in node]

    def to_owners(nbytes):
        theirs, own = (sum(nbytes[owner] for owner in each) for each in (others, node))
        return Load(sent=round(len(node) * theirs), received=round(len(others) * own))

    load, back = to_owners(frames(up)), to_owners(frames(down))
    load.add(Load(sent=back.received, received=back.sent))
    if up.exact:
        load.add(to_owners([4 * len(pieces) for pieces in up.pieces]))
    if down.exact:
        counts = zip(down.candidates, down.kept, strict=True)
        vectors = [(sum(each[rank] for rank in node), sum(each), k) for each, k in counts]
        load.add(search_load(vectors, max(4, down.shape.dtype.itemsize), ranks, len(node)))
    return load


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    st.lists(st.integers(0, 40) | st.sampled_from([64, 1000]), max_size=8),
    st.integers(1, 70),
    st.sampled_from([*SELECTING, *OTHERS]),
    st.sampled_from([*SELECTING, *OTHERS]),
    st.sampled_from(["exact", "shard"]),
    st.sampled_from([torch.float32, torch.float64, torch.float16]),
    st.data(),
)
def test_the_closed_form_is_the_sum_over_the_owners(sizes, ranks, up, down, selection, dtype, data):
    names = tuple(f"p{i}" for i in range(len(sizes)))
    shape = BucketShape(names, tuple((size,) for size in sizes), dtype)
    if selection == "exact" and not (up.selects or up.elementwise):
        selection = "shard"
    size = data.draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    first = size * data.draw(st.integers(0, ranks // size - 1))
    ways = [direction(*each, selection, shape, ranks) for each in (("up", up), ("down", down))]
    found = sharded_load(*ways, data.draw(st.integers(first, first + size - 1)), size)
    assert found == listed_load(*ways, range(first, first + size))


def test_fewer_entries_than_shards_send_what_random_entries_send_on_average():
    """One entry of 1,000, in one of 10 shards: 9 times of 10 another rank owns it."""
    shape = BucketShape(("a",), ((1000,),), torch.float32)
    entry = direction("up", TopK(k=1), "exact", shape, 10)
    empty = direction("down", Identity(), "shard", shape, 10)
    sent = sharded_load(entry, empty, 0).sent - sharded_load(empty, empty, 0).sent
    counts = 4 * 9  # which shards get how many entries, as int32
    frame = wire.framed(nbytes_of(entry.counted(0, [1])))
    assert sent == counts + round(0.9 * frame) - 9 * wire.framed(400)
