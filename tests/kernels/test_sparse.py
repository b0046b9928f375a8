"""Entries of messages: subtracted and added as in plain torch, bit for bit."""

import numpy as np
import pytest
import torch

from tests.kernels.forms import sparse_kernels, use_form
from tests.support.threads import torch_threads
from tests.support.vectors import normal
from torchcomp.kernels import elias_fano, pool, quantize
from torchcomp.kernels.segments import Segment

BACKENDS = ["torch", "numba", *(["cuda"] if torch.cuda.is_available() else [])]
FORMATS = [None, *quantize.FORMATS]
# In order: one thread; several threads and blocks; a bitmap; all entries; no entries.
SHAPES = [(5000, 70), (400_003, 140_011), (5000, 4000), (50, 50), (50, 0), (1, 1), (0, 0)]


@pytest.fixture(params=BACKENDS)
def device(request, monkeypatch):
    """Run a test on every backend. The value is the device for its tensors."""
    if request.param == "cuda":
        return "cuda"
    use_form(request.param, "sparse", monkeypatch)
    return "cpu"


@pytest.fixture(params=[1, 3])
def threads(request):
    with torch_threads(request.param):
        yield request.param


def some_of(n, k, seed=0):
    generator = np.random.default_rng(seed)
    return torch.from_numpy(np.sort(generator.choice(n, k, replace=False)))


def message(n, k, fmt, seed=0, dtype=torch.float32):
    """Return the indices and the fields of a message."""
    index, values = some_of(n, k, seed), normal(k, dtype=dtype, seed=seed)
    (code,) = elias_fano.encode(index, [Segment(0, n, k)])
    (fields,) = quantize.encode(values, [k], fmt, None)
    return index, (*fields, code)


def moved(parts, device):
    return tuple(part.to(device) for part in parts)


def decoded(parts, k, dtype):
    return quantize.decode([parts[:-1]], [k], dtype)[0]


def decoded_index(code, n, k):
    """Return the indices of a code, and whether it is intact."""
    index, damaged = elias_fano.decode([code], [Segment(0, n, k)])
    return index, not damaged


def subtract(x, index, parts, weight=1.0):
    kernels = sparse_kernels((0, x.numel(), index.numel()), device=x.device)
    kernels.subtract(index, [parts], x, weight)


def accumulate(messages, k, out, weight=1.0):
    kernels = sparse_kernels((0, out.numel(), k), device=out.device)
    kernels.accumulate([[parts] for parts in messages], out, weight)


def same_bits(a, b):
    """Compare bits, so that 0.0 and -0.0 differ."""
    return np.array_equal(a.cpu().numpy().view(np.uint8), b.cpu().numpy().view(np.uint8))


# --- Subtracting --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("weight", [1.0, 1 / 3])
def test_subtract_subtracts_the_decoded_values(device, n, k, fmt, dtype, weight):
    index, parts = message(n, k, fmt)
    x = normal(n, dtype=dtype, seed=1)
    expected = x.clone()
    expected[index] -= decoded(parts, k, dtype) * weight
    residual = x.to(device)
    subtract(residual, index.to(device), moved(parts, device), weight)
    assert same_bits(residual, expected)


# --- Adding up ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_accumulate_is_index_add_of_one_message_after_the_other(device, n, k, fmt, dtype):
    made = [message(n, k, fmt, seed) for seed in range(3)]
    out = normal(n, dtype=dtype, seed=7)
    expected = out.clone()
    for index, parts in made:
        expected.index_add_(0, index, decoded(parts, k, dtype), alpha=1 / 3)
    out = out.to(device)
    accumulate([moved(parts, device) for _, parts in made], k, out, 1 / 3)
    # Bit for bit, because ranks with and without Numba must not diverge.
    assert same_bits(out.float(), expected.float())


@pytest.mark.parametrize("fmt", [None, "int8"])
def test_the_number_of_threads_and_of_messages_per_call_does_not_matter(threads, fmt):
    n, k = 1_000_003, 20_011
    made = [message(n, k, fmt, seed)[1] for seed in range(9)]
    out, expected = normal(n), normal(n)
    accumulate(made, k, out, 0.3)
    for parts in made:
        accumulate([parts], k, expected, 0.3)
    assert same_bits(out, expected)


@pytest.mark.parametrize("fmt", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_damaged_code_makes_the_first_entry_nan(device, fmt, dtype):
    _, good = message(5000, 70, fmt)
    bad = (*(torch.full_like(part, 77) for part in good[:-1]), good[-1].clone())
    bad[-1][-1] ^= 128
    out = torch.ones(5000, dtype=dtype, device=device)
    # What else is added depends on the form. The NaN stops the step.
    accumulate([moved(good, device), moved(bad, device), moved(good, device)], 70, out)
    assert out.isnan().all()


@pytest.mark.parametrize("fmt", [None, "int8", "int4"])
@pytest.mark.parametrize(("n", "k"), [(64, 9), (100, 60), (1000, 10), (3000, 3), (3000, 1)])
@pytest.mark.parametrize("chunks", [1, 7])
def test_random_bytes_change_only_the_vector(device, fmt, n, k, chunks, monkeypatch):
    """Guard elements before and after the vector show writes beyond its bounds."""
    monkeypatch.setattr(pool, "chunks", lambda entries: chunks)
    generator = np.random.default_rng(n)
    index, parts = message(n, k, fmt)
    for density in [0.05, 0.1, 0.3, 0.5, 0.9] * 10:
        bits = generator.random(8 * parts[-1].numel()) < density
        code = torch.from_numpy(np.packbits(bits))
        index, intact = decoded_index(code, n, k)
        around = torch.ones(n + 200, device=device)
        accumulate([moved((*parts[:-1], code), device)], k, around[100:-100])
        assert around[:100].eq(1).all()
        assert around[-100:].eq(1).all()
        inside = torch.ones(n).index_add_(0, index, decoded(parts, k, torch.float32))
        assert around[100:-100].cpu().equal(inside) if intact else around[100:-100].isnan().all()


# --- Several segments -----------------------------------------------------------------------------

SEGMENTS = [(0, 5000, 70), (5000, 0, 0), (5000, 50, 50), (5050, 400, 0), (5450, 1000, 300)]
OVERLAPPING = [*SEGMENTS, (0, 5000, 33), (5450, 1000, 1)]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("segments", [SEGMENTS, OVERLAPPING], ids=["apart", "overlapping"])
def test_segments_are_added_one_after_the_other(device, fmt, segments):
    messages = [[message(n, k, fmt, seed)[1] for _, n, k in segments] for seed in range(2)]
    out = normal(6450, seed=7)
    expected = out.clone()
    for parts in messages:
        for (start, n, k), own in zip(segments, parts, strict=True):
            index = decoded_index(own[-1], n, k)[0] + start
            expected.index_add_(0, index, decoded(own, k, torch.float32), alpha=1 / 3)
    out = out.to(device)
    there = [[moved(own, device) for own in parts] for parts in messages]
    kernels = sparse_kernels(*segments, fmt=fmt, device=device)
    kernels.accumulate(there, out, 1 / 3)
    assert same_bits(out, expected)
    mean = torch.full_like(out, torch.nan)
    kernels.mean(there, mean, 3)
    zeros = torch.zeros_like(out)
    kernels.accumulate(there, zeros)
    assert same_bits(mean, zeros.div_(3))


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 3, (torch.bfloat16,) * 2 + (torch.float32,)])
@pytest.mark.parametrize("fmt", FORMATS)
def test_what_a_sum_leaves_is_the_sum_without_the_message(device, fmt, dtypes):
    gradient, wire, residual = dtypes
    g, e = normal(6450, dtype=gradient), normal(6450, dtype=residual, seed=1)
    g[[3, 5440]] = torch.tensor([torch.nan, torch.inf], dtype=gradient)
    rest, total = torch.empty_like(e, device=device), torch.add(g, e, out=torch.empty_like(e))
    kernels = sparse_kernels(*SEGMENTS, fmt=fmt, dtype=wire, device=device)
    parts, index = kernels.encode_sum(g.to(device), e.to(device), rest, None)
    counts = [k for *_, k in SEGMENTS]
    for own, (start, n, k), at in zip(parts, SEGMENTS, index.cpu().split(counts), strict=True):
        own = moved(own, "cpu")
        assert decoded_index(own[-1], n, k)[0].equal(at - start)
        values = decoded(own, k, residual)
        total[at] -= values.where(values.isfinite(), 0.0)
    torch.testing.assert_close(rest.cpu(), total, rtol=0, atol=0, equal_nan=True)
