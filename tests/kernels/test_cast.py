"""Casts to fewer bits: finite values stay finite, and other values do not change."""

import math

import pytest
import torch

from torchcomp.kernels.cast import narrow

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("written", [False, True])
def test_finite_numbers_stay_finite_and_others_stay(source, target, written):
    largest = torch.finfo(source).max
    limit = torch.finfo(target).max
    # Below the limit, at it, rounded up to infinity by a plain cast, and far beyond.
    near = [limit * (1 - 2.0**-12), limit, limit * (1 + 2.0**-13), largest]
    x = torch.tensor([v for v in near if v <= largest] or [largest], dtype=torch.float64)
    x = torch.cat([x, -x, torch.tensor([0.0, -0.0, 1.5])]).to(source)
    x = torch.cat([x[x.isfinite()], torch.tensor([math.nan, math.inf, -math.inf], dtype=source)])
    out = torch.empty(x.numel(), dtype=target) if written else None
    narrowed = narrow(x, target, out)
    assert out is None or narrowed is out
    assert narrowed is x or written or source != target
    assert narrowed.dtype == target
    assert narrowed[-3].isnan()
    assert narrowed[-2:].tolist() == [math.inf, -math.inf]
    x, narrowed = x[:-3], narrowed[:-3]
    assert narrowed.isfinite().all()
    fits = x.double().abs() <= limit
    assert narrowed[fits].equal(x[fits].to(target))
    assert narrowed[~fits].double().equal(x[~fits].double().sign() * limit)


@pytest.mark.parametrize("shape", [(0,), (), (2, 3), (2, 0)])
def test_any_shape(shape):
    x = torch.full(shape, 1e5)
    assert narrow(x, torch.float16).equal(torch.full(shape, 65504.0, dtype=torch.float16))
