"""Quantized values in Triton against plain torch, segment by segment."""

import pytest
import torch

from tests.kernels.forms import use_form
from tests.support.vectors import normal
from torchcomp.kernels import quantize, quantize_triton
from torchcomp.kernels.quantize import LEVELS

TINY = torch.finfo(torch.float32).tiny


def awkward(dtype):
    """Values of several segments: odd lengths, NaN, infinities, subnormal and largest numbers."""
    counts = [1, 0, 2, 127, 128, 129, 1001, 300, 256, 5, 128, 128, 128]
    parts = [normal(count, dtype=dtype, seed=seed) for seed, count in enumerate(counts)]
    parts[6][5], parts[6][300], parts[6][400:560] = torch.nan, -torch.inf, 0.0
    parts[7] *= 1e-39
    parts[8][:] = torch.finfo(dtype).max
    parts[8][3] *= -1
    parts[10][:] = 2 * TINY
    parts[11][:] = 7 * TINY
    parts[12][:] = torch.arange(128) - 63.5  # halves, which are rounded to even
    return parts


def bits(x):
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("fmt", LEVELS)
@pytest.mark.parametrize("dtype", quantize_triton.DTYPES)
def test_the_bits_are_those_of_plain_torch(dtype, fmt, random, monkeypatch):
    use_form("torch", "quantize", monkeypatch)
    parts = awkward(dtype)
    values = torch.cat(parts)
    segments = [(0, 2 * part.numel(), part.numel()) for part in parts]
    drawn = torch.rand(values.numel()) if random else None
    scale, codes = quantize_triton.encode(values, segments, LEVELS[fmt], drawn)

    expected, at = [], 0
    for part in parts:
        own = None if drawn is None else drawn[at : at + part.numel()]
        expected.append(quantize.encode(part, [part.numel()], fmt, own)[0])
        at += part.numel()
    for field, made in enumerate((scale, codes)):
        wanted = torch.cat([encoded[field] for encoded in expected])
        assert made.dtype == wanted.dtype
        assert bits(made).equal(bits(wanted))

    decoded = quantize_triton.decode(scale, codes, segments)
    wanted = [
        quantize.decode([encoded], [part.numel()], torch.float32)[0]
        for encoded, part in zip(expected, parts, strict=True)
    ]
    torch.testing.assert_close(decoded, torch.cat(wanted), rtol=0, atol=0, equal_nan=True)
    assert decoded.isnan().any()


@pytest.mark.parametrize("levels", LEVELS.values())
def test_no_values(levels):
    for segments in ([], [(0, 5, 0)]):
        scale, codes = quantize_triton.encode(torch.empty(0), segments, levels, None)
        assert (scale.numel(), codes.numel()) == (0, 0)
        assert quantize_triton.decode(scale, codes, segments).shape == (0,)
