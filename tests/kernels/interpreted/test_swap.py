"""The conditional swap and fill in Triton's interpreter."""

import math

import pytest
import torch

from torchcomp.kernels.swap_triton import launch


@pytest.mark.parametrize("condition", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [0, 1, 9000])
def test_only_if_the_condition_is_true(condition, dtype, n):
    a, b = torch.full((n,), 1.5, dtype=dtype), torch.full((n,), -2.0, dtype=dtype)
    launch("swap", torch.tensor(condition), a, b)
    assert a.eq(-2.0 if condition else 1.5).all()
    assert b.eq(1.5 if condition else -2.0).all()
    for value in (0.0, math.inf):
        before = a.clone()
        launch("fill", torch.tensor(condition), a, value)
        assert a.eq(value).all() if condition else torch.equal(a, before)
