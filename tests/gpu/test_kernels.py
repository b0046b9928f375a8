"""On the device, kernels give the host's bits, and the host never waits for them."""

import pytest
import torch
from torch import Tensor

import torchcomp
from tests.gpu.place import DEVICE, REHEARSAL, device_forms
from tests.kernels.definitions import awkward, sorted_out
from tests.kernels.forms import sparse_kernels
from tests.support.codecs import codec_of
from tests.support.outcomes import same
from tests.support.vectors import normal
from torchcomp.compressors import Compressor
from torchcomp.engine.keys import Key

SIZES = [2, 65, 4097, 20_000] if REHEARSAL else [2, 65, 4097, 20_000, 140_003, 5_000_011]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPRESSORS = (
    "identity",
    "topk(0.1)",
    'topk(k=3, scope="tensor")',
    'topk(0.1, values="bf16")',
    'topk(0.1, values="int8")',
    'topk(0.2, values="int4", rounding="stochastic")',
    "randk(0.1)",
    'randk(k=3, scope="tensor", unbiased=True)',
    'cast("bf16")',
    'cast("fp16")',
    'quantize("int8")',
    'quantize("int4", rounding="stochastic")',
)


def there(*tensors: Tensor) -> list[Tensor]:
    """Copies on the device. They are copies in a rehearsal as well: no test changes its input."""
    return [tensor.to(DEVICE, copy=True) for tensor in tensors]


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Require equal bits, except that a NaN may have other bits on the device."""
    found, both = found.cpu(), found.isnan().cpu() & expected.isnan()
    assert same(found.masked_fill(both, 0), expected.masked_fill(both, 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_selection(n: int, dtype: torch.dtype) -> None:
    g, e = awkward(n, dtype), normal(n, seed=1)
    total = torch.add(g, e, out=torch.empty(n))
    gradient, residual = there(g, e)
    # The reference sorts, which takes long for a long vector.
    for k in [n // 100] if n > 10**6 else sorted({1, n // 100, n // 3, n - 1} - {0}):
        out = torch.empty(n, device=DEVICE)
        sparse_kernels((0, n, k), device=DEVICE).add_and_select(gradient, residual, out)  # compiles
        with device_forms():
            kernels = sparse_kernels((0, n, k), device=DEVICE)
            chosen = sparse_kernels((0, n, k), device=DEVICE).select(gradient)
            cold = kernels.add_and_select(gradient, residual, out)
            warm = kernels.add_and_select(gradient, residual, out)
        assert_same(chosen, sorted_out(g, k))
        assert_same(out, total)
        assert_same(cold, sorted_out(total, k))
        assert_same(warm, sorted_out(total, k))


# --- Whole messages -------------------------------------------------------------------------------


def messages(compressor: Compressor, g: Tensor, e: Tensor) -> tuple[Tensor, ...]:
    """The frame of g + e, the residual that it leaves, and the sum of four ranks' messages."""
    codec = codec_of(compressor, [700, 3, 1, 4000], g.dtype, g.device, checksum=True)
    rest, sent = torch.empty_like(e), []
    for rank in range(4):
        codec.encode_sum(g, e, rest, Key(3, step=1, rank=rank))
        sent.append(codec.frames.outgoing.clone())
    out = torch.empty_like(g)
    codec.mean(codec.frames.unpack(torch.stack(sent)), out, Key(3, step=1), 4)
    return sent[-1], rest, out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", COMPRESSORS)
def test_a_compressor_makes_the_same_bytes_on_both(spec: str, dtype: torch.dtype) -> None:
    compressor = torchcomp.parse(f"mean({spec})").compressor
    g, e = normal(4704, dtype=dtype), normal(4704, seed=1)
    expected = messages(compressor, g, e)
    on_device = there(g, e)
    messages(compressor, *on_device)  # compiles, which may wait
    with device_forms():
        found = messages(compressor, *on_device)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
