"""Buckets: how parameters are grouped, and where each lies in its bucket."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchcomp.bucket import MIB, Bucket, Caps, memory_order, partition


def parameters(*sizes, dtype=torch.float32):
    """Parameters p0, p1, ... of so many elements, without memory behind them."""
    return [
        (f"p{place}", nn.Parameter(torch.empty(size, dtype=dtype, device="meta")))
        for place, size in enumerate(sizes)
    ]


# --- Parts ----------------------------------------------------------------------------------------


def test_parts_are_views_in_order():
    bucket = Bucket(("a", "empty", "b"), (2, 0, 3), torch.arange(5.0))
    parts = bucket.parts()
    assert [(name, part.tolist()) for name, part in parts.items()] == [
        ("a", [0.0, 1.0]),
        ("empty", []),
        ("b", [2.0, 3.0, 4.0]),
    ]
    parts["b"].zero_()
    assert bucket.flat.tolist() == [0.0, 1.0, 0.0, 0.0, 0.0]


def test_bucket_whose_sizes_do_not_add_up_has_no_parts():
    with pytest.raises(RuntimeError, match="split_with_sizes expects"):
        Bucket(("a", "b"), (2, 2), torch.zeros(5)).parts()


# --- Groups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([], ()),
        ([5], (("p0",),)),
        # 4-byte elements; the first group closes at 40 bytes, every further one at 80.
        ([1, 1, 1], (("p2", "p1", "p0"),)),
        ([7, 10], (("p1",), ("p0",))),
        ([7, 9], (("p1", "p0"),)),
        ([1, 19, 1, 10], (("p3",), ("p2", "p1"), ("p0",))),
        ([100, 100], (("p1",), ("p0",))),
        ([3, 0, 10, 0], (("p3", "p2"), ("p1", "p0"))),
    ],
)
def test_groups_are_filled_in_reverse_order_up_to_their_cap(sizes, groups):
    assert partition(parameters(*sizes), Caps(first=40, rest=80)) == groups


def test_default_caps_are_those_of_ddp():
    third = MIB // 12
    sizes = [4 * MIB, 8 * MIB, third, third, third + 4]
    assert partition(parameters(*sizes), Caps()) == (("p4", "p3", "p2"), ("p1",), ("p0",))


def test_groups_hold_one_dtype_each():
    mixed = [
        *parameters(5, 5, dtype=torch.float32),
        *[(f"half.{name}", p) for name, p in parameters(5, 5, dtype=torch.float16)],
    ]
    interleaved = [mixed[0], mixed[2], mixed[1], mixed[3]]
    assert set(partition(interleaved, Caps(first=1000, rest=1000))) == {
        ("p1", "p0"),
        ("half.p1", "half.p0"),
    }


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    st.lists(st.integers(0, 50), max_size=30),
    st.integers(1, 200),
    st.integers(1, 200),
)
def test_every_parameter_is_in_one_group_and_no_group_closes_early_or_late(sizes, first, rest):
    named = parameters(*sizes)
    groups = partition(named, Caps(first, rest))
    assert [name for group in groups for name in group] == [name for name, _ in reversed(named)]
    nbytes = {name: parameter.nbytes for name, parameter in named}
    for place, group in enumerate(groups):
        cap = rest if place else first
        total = sum(nbytes[name] for name in group)
        assert total >= cap or group == groups[-1]
        assert total - nbytes[group[-1]] < cap


def test_partition_depends_on_the_model_alone():
    named = parameters(7, 0, 11, 3, 20)
    assert partition(iter(named), Caps(40, 80)) == partition(named, Caps(40, 80))


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


def count_up(n):
    """A flat vector that begins in the middle of its storage, as a part of a bucket does."""
    return torch.arange(-3.0, n)[3:]


@pytest.mark.parametrize("parameter", LAYOUTS.values(), ids=LAYOUTS)
def test_dense_parameter_lies_in_its_own_memory_order(parameter):
    flat = count_up(parameter.numel())
    view = memory_order(parameter, flat)
    assert view.shape == parameter.shape
    stored = torch.empty_like(parameter, memory_format=torch.preserve_format).copy_(view)
    in_memory = stored.as_strided((parameter.numel(),), (1,))
    assert stored.stride() == parameter.stride()
    assert torch.equal(in_memory, flat)


@pytest.mark.parametrize("parameter", NOT_DENSE.values(), ids=NOT_DENSE)
def test_other_parameter_lies_contiguously(parameter):
    flat = count_up(parameter.numel())
    assert torch.equal(memory_order(parameter, flat).reshape(-1), flat)


@pytest.mark.parametrize("parameter", [*LAYOUTS.values(), *NOT_DENSE.values()])
def test_memory_order_is_a_view(parameter):
    flat = count_up(parameter.numel())
    memory_order(parameter, flat).fill_(-1.0)
    assert flat.tolist() == [-1.0] * parameter.numel()
