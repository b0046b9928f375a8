"""Quantized values: the bytes, the error, and NaN and infinities."""

import math

import numpy as np
import pytest
import torch

from tests.kernels.definitions import same_bits
from tests.kernels.forms import quantize_form, use_form
from tests.support.codecs import message_of, received
from tests.support.vectors import normal
from torchcomp.kernels import quantize
from torchcomp.kernels.quantize import BLOCK, FORMATS, LEVELS
from torchcomp.routes import wire

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SMALLEST = torch.finfo(torch.float32).tiny
BACKENDS = ["torch", "numba"]
BOTH_WAYS = pytest.mark.parametrize(("fmt", "seed"), [(f, s) for f in LEVELS for s in (None, 5)])
"""Of rounding: to nearest, and at random."""


@pytest.fixture(autouse=True, params=BACKENDS)
def backend(request, monkeypatch):
    """Run every test on every form for the CPU."""
    use_form(request.param, "quantize", monkeypatch)


def encode(values, fmt, seed=None):
    """Encode values in the form of the test, rounded at random if there is a seed."""
    noise, count = None, values.numel()
    if seed is not None:
        noise = torch.from_numpy(np.random.default_rng(seed).random(count, dtype=np.float32))
    return quantize_form().encode(values, fmt, noise)


def decode(parts, count, dtype=torch.float32):
    return quantize_form().decode([parts], count, dtype)[0]


def message(values, fmt, seed=None):
    layout = quantize.layout(fmt, values.numel(), torch.float32)
    return message_of(encode(values, fmt, seed), layout), layout


def through(values, fmt, seed):
    """Encode, pack, unpack and decode: the values that the receiver computes."""
    return decode(received(*message(values, fmt, seed)), values.numel())


@pytest.mark.parametrize(
    ("fmt", "values", "expected"),
    [
        # 254 / 127 = 2.0f = 00 00 00 40; codes 127, -127, 1, 0 (0.5 to even), 2 (1.5 to even).
        ("int8", [254, -254, 2, 1, 3], "00000040 7f 81 01 00 02"),
        # 14 / 7 = 2.0f; codes 7, -7 (nibble 9), 1, -2 (nibble e), 2, and a nibble of padding.
        ("int4", [14, -14, 2, -3, 4], "00000040 97 e1 02"),
        ("int8", [0, 0, 0], "00000000 00 00 00"),
        ("int4", [0, -0.0], "00000000 00"),
        ("bf16", [1.0, -2.5, 1 + 2**-8], "803f 20c0 803f"),
        ("fp16", [1.0, -2.5, 1e9, -1e9], "003c 00c1 ff7b fffb"),
        *((fmt, [], "") for fmt in FORMATS),
    ],
)
def test_worked_examples(fmt, values, expected):
    content, _ = message(torch.tensor(values, dtype=torch.float32), fmt)
    assert bytes(content.tolist()) == bytes.fromhex(expected)


@pytest.mark.parametrize(("drawn", "expected"), [(0.0, [127, 2, -1, 3]), (0.5, [127, 1, -2, 3])])
def test_a_draw_below_the_fraction_rounds_up(drawn, expected):
    values, noise = torch.tensor([127.0, 1.5, -1.5, 3.0]), torch.full((4,), drawn)
    _, codes = quantize_form().encode(values, "int8", noise)
    assert codes.tolist() == expected


def test_the_bounds_have_the_proved_values():
    assert quantize.error_bound("bf16", 10) == 2.0**-16
    assert quantize.error_bound("fp16", 10) == 2.0**-22
    assert quantize.error_bound("int8", 10**6) == pytest.approx(0.0019628, rel=2e-3)
    assert quantize.error_bound("int4", 10**6) == pytest.approx(0.4476, rel=1e-3)
    for fmt, levels in LEVELS.items():
        assert quantize.error_bound(fmt, 10**6) < BLOCK / (4 * levels**2)
        assert max(quantize.error_bound(fmt, 1), quantize.error_bound(fmt, 0)) < 1e-11


# --- NaN, infinities, zeros -----------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@BOTH_WAYS
def test_a_block_with_a_nan_or_an_infinity_is_nan(fmt, seed, bad):
    values = normal(3 * BLOCK)
    values[BLOCK + 7] = bad
    decoded = through(values, fmt, seed).view(3, BLOCK)
    assert decoded[1].isnan().all()
    assert decoded[::2].isfinite().all()
    assert not encode(values, fmt, seed)[1].view(3, -1)[1].any()


@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-40, SMALLEST])
@BOTH_WAYS
def test_a_block_too_small_for_a_scale_is_zero(fmt, seed, largest):
    values = torch.cat([largest * torch.linspace(-1, 1, BLOCK), torch.ones(3)])
    decoded = through(values, fmt, seed)
    assert not decoded[:BLOCK].any()
    assert decoded[BLOCK:].equal(torch.ones(3))


@BOTH_WAYS
def test_the_largest_scale_does_not_overflow(fmt, seed):
    values = torch.full((3,), torch.finfo(torch.float32).max)
    assert through(values, fmt, seed).isfinite().all()


# --- Forms ----------------------------------------------------------------------------------------


def both(call):
    """Return the results of `call` with plain torch and with Numba."""
    made = []
    for backend in BACKENDS:
        with pytest.MonkeyPatch.context() as patch:
            use_form(backend, "quantize", patch)
            made.append(call())
    return made


def adversarial(dtype):
    """Numbers of every magnitude, midpoints of levels, and blocks with one special value each."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (40 * BLOCK,), generator=generator, dtype=torch.int64)
    halves = torch.arange(-254, 258).view(4, BLOCK) / 2
    halves[:, 0] = torch.tensor([127.0, 7.0, 254.0, 14.0])
    powers = torch.ldexp(normal(40, BLOCK), torch.arange(-155, 125, 7)[:, None])
    largest = torch.finfo(torch.float32).max * torch.rand(3, BLOCK, generator=generator)
    bad = normal(6, BLOCK)
    bad[torch.arange(6), torch.arange(6)] = torch.tensor(
        [math.nan, math.inf, -math.inf, 1e-45, SMALLEST, -0.0]
    )
    numbers = [bits.to(torch.int32).view(torch.float32), halves, powers, largest, bad]
    return torch.cat([part.reshape(-1) for part in [*numbers, torch.ones(5)]]).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@BOTH_WAYS
def test_forms_agree_bit_for_bit(fmt, seed, dtype):
    values = adversarial(dtype)
    parts = both(lambda: encode(values, fmt, seed))
    assert all(map(same_bits, *parts))
    for to in DTYPES:
        assert same_bits(*both(lambda to=to: decode(parts[0], values.numel(), to)))


@pytest.mark.parametrize("fmt", LEVELS)
def test_any_bytes_decode_to_the_same_values(fmt):
    layout = quantize.layout(fmt, 1001, torch.float32)
    content = np.random.default_rng(3).integers(0, 256, wire.nbytes(layout), dtype=np.uint8)
    parts = received(torch.from_numpy(content), layout)
    assert same_bits(*both(lambda: decode(parts, 1001)))
