"""Contract tests: every registered compressor must have the properties that it declares."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.codecs import decoded, fields_of, one
from torchcomp.compressors import COMPRESSORS, Cast, Identity, Quantize, RandK, TopK, Warmup
from torchcomp.compressors.base import Vectors
from torchcomp.engine.keys import Key

KEY = Key(seed=7, step=3, tensor=11, rank=1)


BF16, FP16 = torch.finfo(torch.bfloat16), torch.finfo(torch.float16)
FP32 = torch.finfo(torch.float32)
# From this block maximum on, the scale (maximum / 127) is a normal float32.
FINE = (128 * FP32.tiny, FP32.max)
EXAMPLES = {
    **dict.fromkeys([Identity(), TopK(0.25), TopK(1.0), TopK(k=3), TopK(0.25, scope="tensor")]),
    **dict.fromkeys([RandK(0.25), RandK(k=3), RandK(0.25, scope="tensor")]),
    **dict.fromkeys([RandK(0.25, unbiased=True), RandK(k=3, unbiased=True)]),
    Cast("bf16"): (BF16.tiny, BF16.max),
    Cast("fp16"): (FP16.tiny, FP16.max),
    TopK(0.25, values="bf16"): (BF16.tiny, BF16.max),
    TopK(0.25, values="fp16"): (FP16.tiny, FP16.max),
    TopK(0.25, values="int8"): FINE,
    TopK(k=3, values="int4", rounding="stochastic"): FINE,
    Quantize("int8"): FINE,
    Quantize("int4", rounding="stochastic"): FINE,
    Warmup(TopK(0.25), steps=5): None,
    Warmup(RandK(0.25, unbiased=True), steps=5, start=0.5): None,
}
"""Compressors, and the range of magnitudes in which the declared alpha is valid."""


def every_compressor(where=lambda compressor: True):
    """Run a test for every compressor of EXAMPLES that satisfies `where`."""
    fitting = [compressor for compressor in EXAMPLES if where(compressor)]
    return pytest.mark.parametrize("compressor", fitting, ids=str)


def contractive(compressor):
    return compressor.alpha(20) is not None


def unbiased(compressor):
    return compressor.omega(20) is not None


def adversarial_vectors(n):
    """Float64 vectors of `n` elements, each a difficult input for some compressor."""
    noise = torch.Generator().manual_seed(n)
    normal = torch.randn(n, generator=noise, dtype=torch.float64)
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(n)[:n]
    spike = torch.zeros(n, dtype=torch.float64)
    spike[n // 2] = -3.0
    return {
        "gaussian": normal,
        "heavy-tailed": normal / torch.randn(n, generator=noise, dtype=torch.float64),
        "sparse": normal * (torch.rand(n, generator=noise) < 0.1),
        "all equal": torch.full((n,), 1 / 3, dtype=torch.float64),
        "one spike": spike,
        "alternating": signs * 0.7,
        "zeros": torch.zeros(n, dtype=torch.float64),
        "denormal": 5e-324 * torch.arange(1, n + 1, dtype=torch.float64),
        "huge range": signs * torch.logspace(-300, 300, n, dtype=torch.float64),
        "halfway between bf16": signs * (1 + 2.0**-8),
        "halfway between fp16": signs * (1 + 2.0**-11),
    }


VECTORS = list(adversarial_vectors(1))


def dense(compressor, x, key=KEY, name=""):
    """Encode and decode `x`."""
    parts = fields_of(compressor, x.clone(), key, name)
    return decoded(compressor, parts, torch.full_like(x, torch.nan), key, name)


def relative_errors(compressor, x, draws):
    """|C(x) - x|^2 / |x|^2 for each of `draws` keys; 0/0 counts as 0."""
    largest = x.abs().max()
    if not largest:
        return torch.stack([dense(compressor, x, Key(s)).norm() for s in range(draws)])
    # Scale to 1 first: squares of the smallest numbers underflow, those of the largest overflow.
    unit = x / largest
    errors = [(dense(compressor, x, Key(seed)) / largest - unit).norm() for seed in range(draws)]
    return (torch.stack(errors) / unit.norm()) ** 2


def at_most(samples, bound):
    """Whether the mean of `samples` is at most `bound`, up to rounding and 5 standard errors."""
    noise = 5 * samples.std() / len(samples) ** 0.5
    return bool(samples.mean() <= bound * (1 + 1e-12) + noise)


# --- The registry ---------------------------------------------------------------------------------


def test_every_registered_compressor_has_an_example():
    without = set(COMPRESSORS) - {type(compressor) for compressor in EXAMPLES}
    assert not without, f"add examples to EXAMPLES for {without}"


@every_compressor()
def test_declares_contraction_or_variance_in_range(compressor):
    for n in (0, 20):
        alpha, omega = compressor.alpha(n), compressor.omega(n)
        assert alpha is not None or omega is not None
        assert alpha is None or 0 < alpha <= 1
        assert omega is None or omega >= 0
    assert dense(compressor, torch.zeros(0)).numel() == 0


@pytest.mark.parametrize("vector", VECTORS)
@every_compressor()
def test_errors_are_within_the_declared_constants(compressor, vector):
    lowest, highest = EXAMPLES[compressor] or (0.0, torch.inf)
    tiny = [torch.ones(n, dtype=torch.float64) for n in (1, 2, 3, 5)]
    for x in (adversarial_vectors(20)[vector], *(tiny if vector == VECTORS[0] else ())):
        inside = torch.where(x == 0, x, x.abs().clamp(lowest, highest).copysign(x))
        errors = relative_errors(compressor, inside, draws=100)
        alpha, omega = compressor.alpha(len(x)), compressor.omega(len(x))
        assert alpha is None or at_most(errors, 1 - alpha)
        assert omega is None or at_most(errors, omega)


@every_compressor(where=unbiased)
def test_unbiased_compressor_has_the_vector_as_its_mean(compressor):
    x = torch.arange(1, 9, dtype=torch.float64)
    draws = torch.stack([dense(compressor, x, Key(seed)) for seed in range(2000)])
    noise = 5 * draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - x).abs() <= noise + 1e-12).all()


# --- Purity ---------------------------------------------------------------------------------------


def global_random_states():
    name, keys, *rest = np.random.get_state()
    return random.getstate(), (name, keys.tolist(), *rest), torch.get_rng_state().tolist()


@every_compressor()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_round_trips_equal_encoding_and_decoding_one_by_one(compressor, dtype):
    rows = torch.randn(3, 40, dtype=dtype, generator=torch.Generator().manual_seed(2))
    rows[1, ::3] = -0.0
    names, keys = ["a", "b", "c"], [replace(KEY, rank=i) for i in range(3)]
    before, together = rows.clone(), compressor.round_trips(rows, names, keys)
    for row, name, key, found in zip(rows, names, keys, together, strict=True):
        assert torch.equal(found, dense(compressor, row, key, name))
    assert torch.equal(rows, before)
    assert together.data_ptr() != rows.data_ptr()
    rows[1, 5] = torch.nan
    finite = compressor.round_trips(rows, names, keys).isfinite().all(1)
    assert finite.tolist() == [True, False, True]


@every_compressor()
def test_input_message_and_global_random_generators_are_not_changed(compressor):
    x = torch.randn(300, generator=torch.Generator().manual_seed(0))
    before, states = x.clone(), global_random_states()
    parts, vectors = fields_of(compressor, x, KEY), one(compressor, x)
    kept = [part.clone() for part in parts]
    compressor.accumulate([[parts]], torch.ones(300), vectors, KEY, weight=-2.0)
    compressor.mean([[parts]], torch.empty(300, dtype=torch.float64), vectors, KEY, 1)
    assert torch.equal(x, before)
    assert all(map(torch.equal, parts, kept))
    assert global_random_states() == states


@every_compressor()
def test_accumulate_adds_the_weighted_dense_output(compressor):
    x = torch.randn(300, generator=torch.Generator().manual_seed(0))
    out = torch.full((300,), 0.5, dtype=torch.float64)
    vectors = one(compressor, x)
    compressor.accumulate([compressor.encode(x, vectors, KEY).parts], out, vectors, KEY, -3.0)
    torch.testing.assert_close(out, 0.5 - 3.0 * dense(compressor, x).double(), rtol=0, atol=1e-12)


@every_compressor(where=lambda compressor: compressor.summable)
def test_summable_messages_add_up_to_the_sum_of_dense_outputs(compressor):
    mine, theirs = (torch.arange(64.0) * scale for scale in (1, -2))
    (a,), (b,) = (
        fields_of(compressor, x, Key(7, rank=rank)) for rank, x in enumerate((mine, theirs))
    )
    total = decoded(compressor, (a + b,), torch.empty(64), Key(7))
    expected = dense(compressor, mine, Key(7)) + dense(compressor, theirs, Key(7))
    torch.testing.assert_close(total, expected, rtol=0, atol=0)


@every_compressor(where=lambda compressor: compressor.elementwise)
def test_elementwise_compressor_does_not_depend_on_grouping(compressor):
    x = torch.randn(300, generator=torch.Generator().manual_seed(0))
    parts = torch.cat([dense(compressor, part) for part in x.split([1, 120, 179])])
    assert torch.equal(parts, dense(compressor, x))


@every_compressor()
def test_encoding_a_sum_is_adding_encoding_and_subtracting(compressor):
    noise = torch.Generator().manual_seed(0)
    g, e = (torch.randn(300, generator=noise) for _ in range(2))
    rest, vectors = torch.empty(300), Vectors.of(compressor, 300)
    for step in range(3):
        key, total = Key(7, step), g + e
        encoded = compressor.encode_sum(g.clone(), e, rest, vectors, key)
        (parts,), expected = encoded.parts, fields_of(compressor, g + e, key)
        assert all(map(torch.equal, parts, expected))
        other = one(compressor, total)
        compressor.subtract(compressor.encode(total.clone(), other, key), total, other, key)
        assert torch.equal(rest, total)
        e = rest.mul(0.75)


@every_compressor(where=contractive)
def test_a_sum_is_clamped_to_the_range_of_the_message_dtype(compressor):
    g, e = torch.linspace(-2, 2, 300).half(), torch.full((300,), 1e6)
    rest, vectors = torch.empty(300), Vectors.of(compressor, 300, torch.float16)
    (parts,) = compressor.encode_sum(g.clone(), e, rest, vectors, KEY).parts
    sent = decoded(compressor, parts, torch.empty(300), KEY)
    assert 0 < sent.max() <= 66_000
    assert torch.equal(rest, g + e - sent)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@every_compressor()
def test_a_message_of_a_non_finite_vector_decodes_to_a_non_finite_vector(compressor, dtype, odd):
    # Other ranks detect a non-finite gradient in the decoded message only.
    for n, positions in ((1, [0]), (300, [0, 131, 299])):
        for position in positions:
            x = torch.ones(n, dtype=dtype)
            x[position] = odd
            assert not dense(compressor, x).isfinite().all(), (n, position)


# --- RandK ----------------------------------------------------------------------------------------


def support(key, n=1000, k=50, name=""):
    return dense(RandK(k=k), torch.ones(n), key, name).nonzero().flatten().tolist()


@pytest.mark.parametrize("other", [(Key(6, 2), "w"), (Key(5, 3), "w"), (Key(5, 2), "v")], ids=str)
def test_randk_draws_other_entries_for_another_seed_step_or_tensor(other):
    key, name = other
    assert support(key, name=name) != support(Key(5, 2), name="w")


# --- What is kept ---------------------------------------------------------------------------------


KEPT = [(0.07, 100, 7), (0.1, 30, 3), (0.29, 100, 29), (0.01, 25_557_032, 255_571)]
KEPT += [(0.001, 10**15, 10**12), (1.0, 7, 7), (0.01, 1, 1), (1e-9, 5, 1), (0.5, 0, 0)]


@pytest.mark.parametrize(("ratio", "numel", "kept"), KEPT)
@pytest.mark.parametrize("sparsifier", [TopK, RandK], ids=lambda cls: cls.name)
def test_ratio_counts_in_decimals_and_rounds_up(sparsifier, ratio, numel, kept):
    assert sparsifier(ratio).kept(numel) == kept
    assert sparsifier(k=5).kept(numel) == min(5, numel)
