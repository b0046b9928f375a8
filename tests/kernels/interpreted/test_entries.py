"""Entries in Triton against one step of plain torch after another."""

import pytest
import torch

from tests.kernels.test_elias_fano import some_of
from tests.support.vectors import normal
from torchcomp.kernels import entries_triton
from torchcomp.kernels.entries_triton import DTYPES, accumulate, mean, subtract

SHAPES = [(1000, 37, 3), (128, 128, 2), (300, 1, 4), (129, 50, 1)]  # n, k, messages


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Make short vectors use several blocks: the interpreter is slow."""
    for name, size in {"_TILE": 128, "_CHUNK": 16, "_BLOCK": 32}.items():
        monkeypatch.setattr(entries_triton, name, size)


def messages(n, k, count, dtype):
    index = torch.stack([some_of(n, k, seed) for seed in range(count)])
    values = normal(count, k, dtype=dtype, seed=3)
    values[0, 0] = torch.inf
    return index, values


def added(out, index, values, weight):
    """Add messages one after another, in place. Products are rounded."""
    for places, message in zip(index, values, strict=True):
        out[places] = out[places] + message.to(out.dtype) * weight
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_messages_are_added_in_order(shape, dtype):
    n = shape[0]
    for out_dtype in {dtype, torch.float32}:
        index, values = messages(*shape, dtype)
        for weight in (1.0, -0.5):
            out = normal(n, dtype=out_dtype)
            expected = added(out.clone(), index, values, weight)
            accumulate(out, index.int(), values, torch.tensor(False), weight)
            assert out.equal(expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_means(shape, dtype):
    n, _, count = shape
    index, values = messages(*shape, dtype)
    out = torch.full((n,), torch.nan, dtype=dtype)
    mean(out, index, values, torch.tensor(False), count)
    assert out.equal(added(torch.zeros_like(out), index, values, 1.0).div_(count))


def test_values_may_be_a_view_of_frames():
    index, values = messages(500, 20, 3, torch.float32)
    frames = torch.zeros(3, 16 + 80 + 24, dtype=torch.uint8)
    view = frames[:, 16:96].view(torch.float32)
    view.copy_(values)
    out = normal(500)
    expected = added(out.clone(), index, values, 1.0)
    accumulate(out, index, view, torch.tensor(False))
    assert out.equal(expected)


def test_a_product_is_rounded_before_it_is_added():
    index, values = messages(500, 200, 2, torch.float32)
    out = normal(500)
    expected = added(out.clone(), index, values, 0.3)
    accumulate(out, index, values, torch.tensor(False), 0.3)
    assert out.equal(expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_damaged_message_makes_all_values_nan(dtype):
    index = torch.randint(0, 300, (3, 40))
    values = torch.full((3, 40), torch.inf, dtype=dtype)
    out = torch.ones(300, dtype=dtype)
    accumulate(out, index, values, torch.tensor(True))
    assert out.isnan().all()
    out.fill_(1.0)
    mean(out, index, values, torch.tensor(True), 3)
    assert out.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_finite_values_are_subtracted(dtype):
    for values_dtype in {dtype, torch.float32}:
        index, values = some_of(500, 70), normal(70, dtype=values_dtype)
        values[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        for weight in (1.0, -1.0, 0.3):
            x = normal(500, dtype=dtype, seed=5)
            expected = x.clone()
            expected[index[3:]] -= values[3:].to(dtype) * weight
            subtract(x, index, values, weight)
            assert x.equal(expected)


def test_nothing_to_subtract():
    x = normal(5)
    subtract(x, torch.empty(0, dtype=torch.int64), torch.empty(0), 1.0)
    assert x.equal(normal(5))
