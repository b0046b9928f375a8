"""On the device, kernels give the host's bits, and the host never waits for them."""

import pytest
import torch
from torch import Tensor

import torchcomp
from tests.gpu.place import DEVICE, REHEARSAL, device_forms
from tests.kernels.test_select import awkward, sorted_out
from tests.support.codecs import codec_of, framed
from tests.support.outcomes import same
from tests.support.vectors import normal
from torchcomp import wire
from torchcomp.codec import Codec, Message, add_messages
from torchcomp.kernels import elias_fano, entries, quantize, select
from torchcomp.keys import Key

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
        out, scratch = torch.empty(n, device=DEVICE), select.Scratch()
        select.add_and_select(gradient, residual, out, k, scratch)  # compiles, which may wait
        with device_forms():
            chosen = select.largest(gradient, k)
            cold = select.add_and_select(gradient, residual, out, k)
            warm = select.add_and_select(gradient, residual, out, k, scratch)
        assert_same(chosen, sorted_out(g, k))
        assert_same(out, total)
        assert_same(cold, sorted_out(total, k))
        assert_same(warm, sorted_out(total, k))


@pytest.mark.parametrize("n", SIZES[1:])
def test_selection_step_after_step_with_one_scratch(n: int) -> None:
    scratch, k = select.Scratch(), max(1, n // 100)
    residual, out = torch.zeros(n, device=DEVICE), torch.empty(n, device=DEVICE)
    for step in range(8):
        # Gradients that grow, shrink and vanish: the last threshold misleads.
        (gradient,) = there(normal(n, seed=step) * (1.0, 3.0, 0.01, 0.0)[step % 4])
        chosen = select.add_and_select(gradient, residual, out, k, scratch)
        assert_same(chosen, sorted_out(out.cpu(), k))
        residual, out = out.index_fill(0, chosen, 0.0), residual


@pytest.mark.parametrize(("n", "k"), [(5000, 70), (5000, 4000), (50, 50), (300_000, 3000)])
def test_elias_fano_codes(n: int, k: int) -> None:
    index = sorted_out(normal(n), k)
    (chosen,) = there(index)
    with device_forms():
        code = elias_fano.encode(chosen, n)
        decoded, intact = elias_fano.decode(code, n, k)
    assert_same(code, elias_fano.encode(index, n))
    assert_same(decoded, index)
    assert bool(intact)


@pytest.mark.parametrize("fmt", [None, *quantize.FORMATS])
def test_entries_are_subtracted_and_added(fmt: str | None) -> None:
    n, k = 5000, 70
    x, messages = normal(n, seed=7), []
    for seed in range(8):
        index, values = sorted_out(normal(n, seed=seed), k), normal(k, seed=seed)
        messages.append((*quantize.encode(values, fmt, None), elias_fano.encode(index, n)))
    subtracted, summed = x.clone(), x.clone()
    entries.subtract(subtracted, index, messages[-1][:-1])
    entries.accumulate(messages, k, summed, 1 / 3)
    first, second, chosen = there(x, x, index)
    parts = [there(*message) for message in messages]
    with device_forms():
        entries.subtract(first, chosen, parts[-1][:-1])
        entries.accumulate(parts, k, second, 1 / 3)
    assert_same(first, subtracted)
    assert_same(second, summed)


@pytest.mark.parametrize("fmt", quantize.FORMATS)
@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 5000])
def test_quantisation(fmt: str, count: int) -> None:
    values = normal(count).pow(3)
    (vector,) = there(values)
    with device_forms():
        parts = quantize.encode(vector, fmt, None)
        decoded = quantize.decode(parts, count, torch.float32)
    expected = quantize.encode(values, fmt, None)
    for found, wanted in zip(parts, expected, strict=True):
        assert_same(found, wanted)
    assert_same(decoded, quantize.decode(expected, count, torch.float32))


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("length", [1, 8, 1000, 2**17 + 3])
def test_frames(length: int, checksum: bool) -> None:
    message = torch.randint(0, 256, (length,), dtype=torch.uint8)
    (copy,) = there(message)
    layout = (wire.Field("codes", torch.uint8, length),)
    frames = wire.Frames([layout], copy.device, checksum)
    with device_forms():
        frame = framed(copy, frames)
        bad = frame.clone()
        bad[8 if checksum else 2 :].bitwise_xor_(1)
        headers = frames.headers(torch.stack([frame, bad]))
        differences = headers ^ frames.expected
    intact, damaged = differences.tolist()
    assert frames.finding(*intact) == wire.INTACT
    assert frames.finding(*damaged) == (wire.DAMAGED if checksum else wire.OTHER_LENGTH)
    assert_same(frame, framed(message, wire.Frames([layout], message.device, checksum)))


# --- Whole messages -------------------------------------------------------------------------------


def messages(codec: Codec, g: Tensor, e: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The frame of g + e, the residual that it leaves, and the sum of four ranks' messages."""
    x, sent, frames = torch.empty_like(e), [], codec.frames(g.device, checksum=True)
    scratch = codec.scratch()
    for rank in range(4):
        key = Key(3, step=1, rank=rank)
        message: Message = codec.encode_sum(g, e, x, key, scratch, dtype)
        sent.append(frames.pack([each.parts for each in message]).clone())
        codec.subtract(message, x, key)
    out = torch.zeros_like(g)
    parts = frames.unpack(torch.stack(sent))
    add_messages([(codec, each) for each in parts], out, Key(3, step=1), 0.25)
    return sent[-1], x, out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", COMPRESSORS)
def test_a_compressor_makes_the_same_bytes_on_both(spec: str, dtype: torch.dtype) -> None:
    compressor = torchcomp.parse(f"mean({spec})").compressor
    codec = codec_of(compressor, [700, 3, 1, 4000], dtype)
    g, e = normal(4704, dtype=dtype), normal(4704, seed=1)
    expected = messages(codec, g, e, dtype)
    on_device = there(g, e)
    messages(codec, *on_device, dtype)  # compiles, which may wait
    with device_forms():
        found = messages(codec, *on_device, dtype)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
