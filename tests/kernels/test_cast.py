"""Casts to fewer bits: finite values stay finite, and other values do not change."""

import math

import pytest
import torch

from torchcomp.kernels.cast import narrow

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("written", [False, True])
def test_finite_numbers_stay_finite(source, target, written):
    largest = torch.finfo(source).max
    limit = torch.finfo(target).max
    # Below the limit, at it, rounded up to infinity by a plain cast, and far beyond.
    near = [limit * (1 - 2.0**-12), limit, limit * (1 + 2.0**-13), largest]
    x = torch.tensor([v for v in near if v <= largest] or [largest], dtype=torch.float64)
    x = torch.cat([x, -x, torch.tensor([0.0, -0.0, 1.5])]).to(source)
    x = x[x.isfinite()]
    out = torch.empty(x.numel(), dtype=target) if written else None
    narrowed = narrow(x, target, out)
    assert out is None or narrowed is out
    assert narrowed.dtype == target
    assert narrowed.isfinite().all()
    fits = x.double().abs() <= limit
    assert narrowed[fits].equal(x[fits].to(target))
    assert narrowed[~fits].double().equal(x[~fits].double().sign() * limit)


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_nan_and_infinities_stay(source, target):
    x = torch.tensor([math.nan, math.inf, -math.inf, 1.0], dtype=source)
    narrowed = narrow(x, target)
    assert narrowed[0].isnan()
    assert narrowed[1:].tolist() == [math.inf, -math.inf, 1.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_dtype_is_not_copied(dtype):
    x, out = torch.ones(3, dtype=dtype), torch.zeros(3, dtype=dtype)
    assert narrow(x, dtype) is x
    assert narrow(x, dtype, out) is out
    assert out.equal(x)


@pytest.mark.parametrize("shape", [(0,), (), (2, 3), (2, 0)])
def test_any_shape(shape):
    x = torch.full(shape, 1e5)
    assert narrow(x, torch.float16).equal(torch.full(shape, 65504.0, dtype=torch.float16))
