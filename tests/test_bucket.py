"""Buckets: how parameters are grouped, and the position of each in its bucket."""

import pytest
import torch
from torch import nn

from torchcomp.engine.bucket import Bucket, BucketShape, memory_order, merge, partition


def parameters(*sizes, dtype=torch.float32):
    """Parameters p0, p1, ... with these numbers of elements, without memory."""
    return [
        (f"p{i}", nn.Parameter(torch.empty(size, dtype=dtype, device="meta")))
        for i, size in enumerate(sizes)
    ]


# --- Shapes ---------------------------------------------------------------------------------------


def shape(dtype=torch.float32, **shapes):
    """A shape of contiguous parameters."""
    return BucketShape(tuple(shapes), tuple(map(tuple, shapes.values())), dtype)


def test_equal_shapes_have_equal_hashes_and_strides_matter():
    conv = torch.zeros(2, 3, 2, 2)
    one = BucketShape.of(["conv"], {"conv": conv})
    other = BucketShape.of(["conv"], {"conv": conv.to(memory_format=torch.channels_last)})
    assert one == shape(conv=[2, 3, 2, 2])
    assert hash(one) == hash(shape(conv=[2, 3, 2, 2]))
    assert one not in (other, shape(conv=[24]))


def test_selected_parameters_keep_their_order_dtype_and_strides():
    held = {"a": torch.zeros(2), "tied": torch.zeros(5, 3).t(), "b": torch.zeros(4)}
    chosen = BucketShape.of(["b", "tied", "a"], held).select(["a", "tied", "foreign"])
    assert (chosen.names, chosen.shapes) == (("tied", "a"), ((3, 5), (2,)))
    assert chosen == BucketShape.of(["tied", "a"], held)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 40])
def test_shards_divide_a_bucket_evenly_in_order(world_size):
    bucket = shape(a=[7], empty=[0], b=[2, 5], one=[1])
    shards = bucket.shards(world_size)
    assert [(s.start, s.stop) for s in shards] == [
        (rank * 18 // world_size, (rank + 1) * 18 // world_size) for rank in range(world_size)
    ]
    flat = torch.arange(18)
    parts = Bucket(bucket, flat).parts()
    for shard in shards:
        extents = zip(shard.names, shard.offsets, shard.sizes, strict=True)
        contents = [parts[name][at : at + size] for name, at, size in extents]
        assert torch.equal(torch.cat([flat[:0], *contents]), flat[shard.span])
        assert all(part.numel() for part in contents)


# --- Parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_are_views_in_the_parameters_shapes_and_memory_order(dtype):
    like = LAYOUTS | NOT_DENSE
    held = {name: torch.randn(p.shape, dtype=dtype) for name, p in like.items()}
    bucket = Bucket.read(BucketShape.of(like, like), held)
    assert list(bucket.parts()) == list(bucket.names) == list(like)
    assert torch.equal(torch.cat(list(bucket.parts().values())), bucket.flat)
    for name, view in bucket.tensors().items():
        assert torch.equal(view, held[name].float())
        assert torch.equal(memory_order(like[name], bucket.parts()[name]), view)
    bucket.flat.fill_(3.0)
    bucket.write(held)
    assert all((tensor == 3.0).all() for tensor in held.values())


# --- Groups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([], ()),
        ([5], (("p0",),)),
        # 4-byte elements. The first group is full at 40 bytes, all others at 80.
        ([1, 1, 1], (("p2", "p1", "p0"),)),
        ([7, 10], (("p1",), ("p0",))),
        ([7, 9], (("p1", "p0"),)),
        ([1, 19, 1, 10], (("p3",), ("p2", "p1"), ("p0",))),
        ([100, 100], (("p1",), ("p0",))),
        ([3, 0, 10, 0], (("p3", "p2"), ("p1", "p0"))),
    ],
)
def test_groups_are_filled_in_reverse_order_up_to_their_cap(sizes, groups):
    assert partition(parameters(*sizes), (40, 80)) == groups


def test_groups_hold_one_dtype_each():
    more = [(f"half.{name}", p) for name, p in parameters(5, 5, dtype=torch.float16)]
    pairs = zip(parameters(5, 5), more, strict=True)
    groups = partition([each for pair in pairs for each in pair], (1000,))
    assert set(groups) == {("p1", "p0"), ("half.p1", "half.p0")}


def test_merged_groups_are_one_for_each_dtype_in_their_order():
    named = dict([*parameters(5, 5), ("half", torch.zeros(3).half()), ("more", torch.zeros(1))])
    assert merge([("p1",), ("half",), ("p0", "more")], named) == (("p1", "p0", "more"), ("half",))
    assert merge([], named) == ()


# --- Memory order ---------------------------------------------------------------------------------

LAYOUTS = {
    "contiguous": torch.empty(2, 3, 4, 5),
    "channels_last": torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels_last, 1 x 1": torch.empty(4, 3, 1, 1).to(memory_format=torch.channels_last),
    "channels_last, one channel": torch.empty(4, 1, 2, 2).to(memory_format=torch.channels_last),
    "channels_last_3d": torch.empty(2, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d),
    "transposed": torch.empty(3, 4).t(),
    "permuted": torch.empty(2, 3, 4).permute(1, 2, 0),
    "permuted, one row of any stride": torch.empty_strided((3, 1, 2), (1, 77, 3)),
    "scalar": torch.empty(()),
    "empty": torch.empty(3, 0, 2),
}
NOT_DENSE = {
    "every other row": torch.empty(6, 3)[::2],
    "every other column": torch.empty(3, 6)[:, ::2],
    "expanded": torch.empty(1, 3).expand(4, 3),
}


@pytest.mark.parametrize("name", [*LAYOUTS, *NOT_DENSE])
def test_dense_parameters_are_stored_in_their_own_memory_order_and_others_contiguously(name):
    parameter = (LAYOUTS | NOT_DENSE)[name]
    # It starts in the middle of its storage, like a part of a bucket.
    flat = torch.arange(-3.0, parameter.numel())[3:]
    view = memory_order(parameter, flat)
    assert view.shape == parameter.shape
    if name in NOT_DENSE:
        assert torch.equal(view.reshape(-1), flat)
    else:
        stored = torch.empty_like(parameter, memory_format=torch.preserve_format).copy_(view)
        assert stored.stride() == parameter.stride()
        assert torch.equal(stored.as_strided((parameter.numel(),), (1,)), flat)
