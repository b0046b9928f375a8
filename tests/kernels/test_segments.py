"""Parts of tensors, joined without a copy where memory allows it."""

import pytest
import torch

from tests.support.vectors import normal
from torchcomp.kernels.segments import joined, within


def shares(result, x):
    return result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_adjacent_parts_are_joined_without_a_copy():
    x = normal(20)
    parts = x[2:5], x[5:6], x[6:20]
    assert torch.equal(joined(parts), x[2:])
    assert shares(joined(parts), x)
    assert joined([x]) is x


PARTS = {
    "a gap": lambda x, y: (x[:5], x[6:9]),
    "out of order": lambda x, y: (x[5:9], x[:5]),
    "overlapping": lambda x, y: (x[:5], x[4:9]),
    "repeated": lambda x, y: (x[:5], x[:5]),
    "two tensors": lambda x, y: (x[17:], y[:3]),
    "strided": lambda x, y: (x[:8:2], x[8:12]),
    "empty": lambda x, y: (x[:0], y[:3]),
    "of a simulated or absent device": lambda x, y: (x[17:].to("meta"), y[:3].to("meta")),
}


@pytest.mark.parametrize("case", PARTS)
def test_other_parts_are_copied(case):
    x, y = normal(20), normal(20, seed=1)
    parts = PARTS[case](x, y)
    result = joined(parts)
    assert result.shape == torch.cat(parts).shape
    if not result.is_meta:
        assert torch.equal(result, torch.cat(parts))
        assert not shares(result, x)
        assert not shares(result, y)


@pytest.mark.parametrize("case", PARTS)
def test_parts_are_where_they_are_said_to_be(case):
    parts = PARTS[case](normal(20), normal(20, seed=1))
    whole, at = within(parts)
    for part, start in zip(parts, at, strict=True):
        found = whole[start : start + part.numel()]
        assert found.shape == part.shape
        assert found.is_meta or torch.equal(found, part)
