"""Sparse messages: plain torch does what is defined, and every other form does the same."""

import contextlib

import numpy as np
import pytest
import torch

from tests.kernels.definitions import awkward, same, same_bits, some_of, sorted_out, specified
from tests.kernels.forms import sparse_kernels, use_form
from tests.support.cases import only
from tests.support.threads import torch_threads
from tests.support.vectors import normal
from torchcomp.kernels import backend, elias_fano, pool, quantize

FORMS = ["numba", "device", *(["cuda"] if torch.cuda.is_available() else [])]
FORMATS = [None, *quantize.FORMATS]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
"""Of gradients and messages. Residuals are in float32 or wider."""
SEGMENTS = {
    "several": [(0, 5000, 70), (5000, 0, 0), (5000, 50, 50), (5050, 400, 0), (5450, 1000, 300)],
    "threads and blocks": [(0, 400_003, 140_011)],
    "alike": [(0, 300, 4), (300, 300, 4), (600, 300, 4)],
    "a bitmap": [(0, 5000, 4000)],
    "all, alone": [(0, 50, 50)],
    "none": [(0, 50, 0)],
    "nothing": [(0, 0, 0)],
}
CASES = [(case, fmt, dtype) for case in SEGMENTS for fmt in FORMATS for dtype in DTYPES]
NOW = [case for case in CASES if case[0] == "several"] + CASES[::7]


@contextlib.contextmanager
def using(form):
    """Run a form; yield the device for its tensors. That for devices is plain torch."""
    with pytest.MonkeyPatch.context() as patch:
        if form != "cuda":
            use_form("numba" if form == "numba" else "torch", "sparse", patch)
        if form == "device":
            patch.setattr("torchcomp.engine.host.can_read", lambda x: False)
        yield "cuda" if form == "cuda" else "cpu"


def through(case, fmt, dtype, device="cpu"):
    """Two steps with one workspace: whatever kernels compute, each time with other numbers."""
    segments, memory = SEGMENTS[case], torch.promote_types(dtype, torch.float32)
    numel, total = segments[-1][0] + segments[-1][1], sum(k for *_, k in segments)
    kernels, found = sparse_kernels(*segments, fmt=fmt, dtype=dtype, device=device), []
    for step in range(2):
        noise = torch.rand(total, generator=torch.Generator().manual_seed(step)).to(device)
        drawn = noise if fmt in quantize.LEVELS and step else None
        g, e, x = awkward(numel, dtype), normal(numel, dtype=memory, seed=1), normal(numel, seed=2)
        out, y = normal(numel, dtype=dtype, seed=3), normal(numel, dtype=memory, seed=4)
        g, e, x, out, y = (tensor.to(device) for tensor in (g, e, x, out, y))
        rest, mean = torch.empty_like(e), torch.full_like(out, torch.nan)
        parts, index = kernels.encode_sum(g, e, rest, drawn)
        # A second message, whose values are finite.
        others = kernels.encode(x, kernels.select(x), drawn)
        kernels.subtract(index, parts, y, 1 / 3)
        kernels.accumulate([others, parts], out, 1 / 3)
        kernels.mean([parts, others, others], mean, 3)
        found.append((index, rest, parts, others, y, out, mean))
    return found


def flat(found):
    for index, rest, parts, others, *more in found:
        fields = [field for own in (*parts, *others) for field in own]
        yield from (index, rest, *fields, *more)


@pytest.mark.parametrize("case", only(CASES, now=NOW), ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_computes_the_bits_of_plain_torch(form, case):
    with using("torch"):
        expected = through(*case)
    with using(form) as device:
        found = through(*case, device)
    assert all(same_bits(a, b) for a, b in zip(flat(found), flat(expected), strict=True))


@pytest.mark.parametrize("case", only(CASES, now=NOW), ids=str)
def test_plain_torch_does_what_is_defined(case):
    name, _, dtype = case
    segments, memory = SEGMENTS[name], torch.promote_types(dtype, torch.float32)
    numel = segments[-1][0] + segments[-1][1]
    with using("torch"):
        index, rest, parts, others, y, out, mean = through(*case)[0]
    total = torch.add(
        awkward(numel, dtype), normal(numel, dtype=memory, seed=1), out=torch.empty_like(rest)
    )
    chosen = [sorted_out(total[at : at + n], k) + at for at, n, k in segments]
    assert index.equal(torch.cat(chosen))
    added, expected = normal(numel, dtype=dtype, seed=3), normal(numel, dtype=memory, seed=4)
    sums = torch.zeros(numel, dtype=dtype)
    for message in (others, parts):
        for own, (start, n, k), at in zip(message, segments, chosen, strict=True):
            (local,), damaged = elias_fano.decode([own[-1]], n, k)
            assert own[-1].tolist() == specified(local.tolist(), n)
            assert not damaged
            values = [quantize.decode([own[:-1]], k, to)[0] for to in (dtype, memory)]
            added.index_add_(0, local + start, values[0], alpha=1 / 3)
            if message is parts:
                assert local.equal(at - start)
                finite = values[1].where(values[1].isfinite(), 0.0)
                total[at] -= finite
                expected[at] -= finite * (1 / 3)
    for message in (parts, others, others):
        for own, (start, n, k) in zip(message, segments, strict=True):
            (local,), _ = elias_fano.decode([own[-1]], n, k)
            sums.index_add_(0, local + start, quantize.decode([own[:-1]], k, dtype)[0])
    for a, b in ((rest, total), (y, expected), (out, added), (mean, sums.div_(3))):
        same(a, b)


# --- Threads and damage ---------------------------------------------------------------------------


@pytest.fixture(params=["torch", *FORMS])
def device(request):
    """Run a test in every form. The value is the device for its tensors."""
    with using(request.param) as device:
        yield device


def message(n, k, fmt, seed=0):
    """The fields of a message."""
    index, values = some_of(n, k, seed), normal(k, seed=seed)
    return (*quantize.encode(values, fmt, None), elias_fano.encode(index, n))


def accumulate(messages, k, out, weight=1.0):
    there = [[tuple(part.to(out.device) for part in parts)] for parts in messages]
    sparse_kernels((0, out.numel(), k), device=out.device).accumulate(there, out, weight)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("fmt", [None, "int8"])
def test_the_number_of_threads_and_of_messages_per_call_does_not_matter(threads, fmt):
    n, k = 1_000_003, 20_011
    made = [message(n, k, fmt, seed) for seed in range(9)]
    out, expected = normal(n), normal(n)
    with torch_threads(threads):
        accumulate(made, k, out, 0.3)
    for parts in made:
        accumulate([parts], k, expected, 0.3)
    assert same_bits(out, expected)


@pytest.mark.parametrize("fmt", [None, "int4"])
@pytest.mark.parametrize(("n", "k"), [(64, 9), (100, 60), (1000, 10), (3000, 1)])
@pytest.mark.parametrize("inline", [pool.INLINE, 0])
def test_random_bytes_change_only_the_vector_and_damage_makes_it_nan(
    device, fmt, n, k, inline, monkeypatch
):
    """Guard elements before and after the vector show writes beyond its bounds."""
    monkeypatch.setattr(pool, "INLINE", inline)
    if backend.fast_form("sparse", "cpu"):
        monkeypatch.setattr("torchcomp.kernels.sparse_numba._BLOCK", 61)
    generator, parts = np.random.default_rng(n), message(n, k, fmt)
    for density in [0.05, 0.1, 0.3, 0.5, 0.9] * 10:
        bits = generator.random(8 * parts[-1].numel()) < density
        code = torch.from_numpy(np.packbits(bits))
        (index,), damaged = elias_fano.decode([code], n, k)
        around = torch.ones(n + 200, device=device)
        accumulate([(*parts[:-1], code)], k, around[100:-100])
        assert around[:100].eq(1).all()
        assert around[-100:].eq(1).all()
        values = quantize.decode([parts[:-1]], k, around.dtype)[0]
        inside = torch.ones(n).index_add_(0, index, values)
        found = around[100:-100].cpu()
        assert found.isnan().all() if damaged else found.equal(inside)


def test_one_damaged_code_among_good_ones_makes_all_nan(device):
    good = message(5000, 70, "int8")
    bad = (*good[:-1], good[-1].clone())
    bad[-1][-1] ^= 128
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.ones(5000, dtype=dtype, device=device)
        accumulate([good, bad, good], 70, out)
        assert out.isnan().all()
