"""Parts of tensors, joined without a copy where memory allows it."""

import pytest
import torch

from tests.support.vectors import normal
from torchcomp.kernels.segments import joined

PARTS = {
    "adjacent": lambda x, y: (x[2:5], x[5:6], x[6:20]),
    "alone": lambda x, y: (x,),
    "a gap": lambda x, y: (x[:5], x[6:9]),
    "out of order": lambda x, y: (x[5:9], x[:5]),
    "overlapping": lambda x, y: (x[:5], x[4:9]),
    "repeated": lambda x, y: (x[:5], x[:5]),
    "two tensors": lambda x, y: (x[17:], y[:3]),
    "strided": lambda x, y: (x[:8:2], x[4:8]),
    "empty": lambda x, y: (x[:0], y[:3]),
    "of a simulated or absent device": lambda x, y: (x[17:].to("meta"), y[:3].to("meta")),
}


@pytest.mark.parametrize("case", PARTS)
def test_parts_are_joined_and_only_adjacent_ones_are_not_copied(case):
    x, y = normal(20), normal(20, seed=1)
    parts = PARTS[case](x, y)
    result = joined(parts)
    assert result.shape == torch.cat(parts).shape
    if not result.is_meta:
        assert torch.equal(result, torch.cat(parts))
        memories = {each.untyped_storage().data_ptr() for each in (x, y)}
        assert (result.untyped_storage().data_ptr() in memories) == (case in ("adjacent", "alone"))
