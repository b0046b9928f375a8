"""Messages: their bytes are as documented, and they decode to what was encoded."""

import hashlib

import numpy as np
import pytest
import torch

from tests.support import codecs
from tests.support.codecs import codec_of, fields_of, framed, is_intact, message_of, nbytes_of
from tests.support.vectors import normal
from tests.test_compressors import EXAMPLES
from torchcomp.compressors import Cast, Identity, Quantize, RandK, TopK
from torchcomp.engine import host
from torchcomp.engine.keys import Key
from torchcomp.routes import wire
from torchcomp.routes.wire import Field, Frames

KEY = Key(seed=7, step=3)
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]

every_compressor = pytest.mark.parametrize("compressor", list(EXAMPLES), ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def decoded(codec, parts, dtype=torch.float32):
    """Decode the fields of a message."""
    total = codec.vectors[-1].span.stop if codec.vectors else 0
    out = torch.full((total,), torch.nan, dtype=dtype)
    codec.mean([parts], out, KEY, 1)
    return out


def bits(tensor):
    """The bytes of a tensor, for comparisons that distinguish -0.0 from 0.0."""
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def unaligned(raw):
    """Copy `raw` to an odd address."""
    copy = torch.empty(raw.numel() + 1, dtype=torch.uint8)[1:]
    return copy.copy_(raw)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (5, 0, 2), (0, 3, 0), (0,), (7, 1, 257, 1)], ids=str)
@every_dtype
@every_compressor
def test_bucket_of_odd_parameters_is_equal_after_packing_and_unpacking(compressor, dtype, sizes):
    codec = codec_of(compressor, sizes, dtype)
    message = codec.encode(normal(sum(sizes), dtype=dtype), KEY)
    (received,) = codec.frames.unpack(unaligned(codec.frames.pack(message.parts)))
    assert bits(decoded(codec, received, dtype)) == bits(decoded(codec, message.parts, dtype))


@every_compressor
def test_bucket_decodes_to_each_vectors_own_output(compressor):
    sizes = (5, 0, 64, 1)
    codec = codec_of(compressor, sizes)
    x = normal(sum(sizes))
    expected = []
    for vector in codec.vectors:
        part, name = x[vector.span], vector.name
        fields = fields_of(compressor, part, KEY, name)
        expected.append(codecs.decoded(compressor, fields, torch.empty_like(part), KEY, name))
    assert bits(decoded(codec, codec.encode(x, KEY).parts)) == bits(torch.cat(expected))


@pytest.mark.parametrize(
    ("compressor", "sizes", "dtype", "nbytes"),
    [
        (Identity(), (10,), torch.float32, 40),
        (Identity(), (10,), torch.bfloat16, 20),
        (Cast("bf16"), (10,), torch.float64, 20),
        (RandK(0.25), (10,), torch.float32, 3 * 4),
        # A bitmap of 10 bits.
        (TopK(0.25), (10,), torch.float32, 3 * 4 + 2),
        (TopK(0.25), (10,), torch.float16, 3 * 2 + 2),
        # 3 low parts of 14 bits, and a high part of 3 + 3 bits.
        (TopK(k=3), (2**16,), torch.float32, 3 * 4 + 6 + 1),
        (TopK(k=3, scope="tensor"), (2**16, 1, 0), torch.float32, 3 * 4 + 7 + 4),
        (TopK(k=3, values="int8"), (2**16,), torch.float32, 4 + 3 + 7),
        (TopK(k=3, values="int4"), (2**16,), torch.float32, 4 + 2 + 7),
        (TopK(k=3, values="bf16"), (2**16,), torch.float64, 3 * 2 + 7),
        (Quantize("int4"), (257,), torch.float32, 3 * 4 + 129),
        # Low parts of 6 bits, and a high part of one bit per entry and one per 64 elements.
        (TopK(0.01), (25_557_032,), torch.float32, 255_571 * 4 + 191_679 + 81_863),
    ],
    ids=str,
)
def test_length_equals_a_hand_calculation(compressor, sizes, dtype, nbytes):
    assert nbytes_of(codec_of(compressor, sizes, dtype)) == nbytes


# --- Wrong lengths, parts and alignments ----------------------------------------------------------

LAYOUT = (Field("index", torch.uint16, 3), Field("values", torch.float32, 3))
GOOD = (torch.zeros(3, dtype=torch.uint16), torch.zeros(3))


@pytest.mark.parametrize("length", [0, 18, 32, 48])
def test_frames_of_another_length_are_refused(length):
    frames = Frames([LAYOUT], CPU)
    assert (frames.lengths, frames.sizes, frames.nbytes) == ((18,), (40,), 40)
    for shape in ((length,), (3, length)):
        with pytest.raises(ValueError, match=rf"\b{length} bytes.* 40 bytes"):
            frames.unpack(torch.zeros(shape, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ((GOOD[0], torch.zeros(2)), r"'values'.* 3 x torch\.float32.* 2 x torch\.float32"),
        ((GOOD[0], torch.zeros(3).double()), r"'values'.* torch\.float32.* 3 x torch\.float64"),
        ((GOOD[0].int(), GOOD[1]), r"'index'.* 3 x torch\.uint16.* 3 x torch\.int32"),
        (GOOD[:1], "argument"),
        ((*GOOD, torch.zeros(1)), "argument"),
    ],
)
def test_part_that_differs_from_the_layout_is_refused(parts, problem):
    with pytest.raises(ValueError, match=problem):
        message_of(parts, LAYOUT)


# --- Frames ---------------------------------------------------------------------------------------

VALUES = (Field("values", torch.float32, 1), Field("index", torch.uint8, 5))
BYTES = tuple(range(1, 10))


def frame_of(checksum=False):
    """The frames of one message, and the frame of BYTES."""
    frames = Frames([VALUES], CPU, checksum)
    return frames, framed(torch.tensor(BYTES, dtype=torch.uint8), frames)


def words_of(frame):
    return [int.from_bytes(bytes(word), "little") for word in frame.view(-1, 8).tolist()]


def test_a_signature_of_counts_is_in_the_header():
    signed = wire.counted_signature(1000, [3, 0, 2])
    assert signed == 1000 + 3 + 5 * 2
    assert wire.counted_signature(1000, [0, 3, 2]) != signed
    frames = Frames([VALUES, VALUES], CPU, counts=[1, 1], signatures=[signed, 2**62])
    assert words_of(frames.outgoing)[1::4] == [signed, 2**62]


def test_frame_is_version_magic_and_length_then_the_layout_then_the_message_up_to_8_bytes():
    frames, frame = frame_of()
    digest = hashlib.sha256(b"values float32 1\nindex uint8 5\n").digest()
    layout = int.from_bytes(digest[:8], "little") % 2**63
    payload = [int.from_bytes(bytes(BYTES[:8]), "little"), BYTES[8]]
    assert words_of(frame) == [6 + 256 * wire.MAGIC + 65536 * 9, layout, *payload]
    assert is_intact(frame, frames)
    frames, frame = frame_of(checksum=True)
    total = layout + 1 * payload[0] + 3 * payload[1]
    assert words_of(frame)[1] == total % 2**64
    assert is_intact(frame, frames)


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("checksum", [True, False])
def test_every_changed_bit_of_the_header_is_detected_and_of_the_message_with_a_checksum(
    checksum, on_host, monkeypatch
):
    monkeypatch.setattr(host, "can_read", lambda x: on_host)
    frames, good = frame_of(checksum)
    for bit in range(8 * good.numel()):
        bad = good.clone()
        bad[bit // 8] ^= 1 << bit % 8
        assert is_intact(bad, frames) == (bit >= 128 and not checksum)


@pytest.mark.parametrize(
    "layout",
    [
        (VALUES[0], Field("codes", torch.uint8, 5)),
        (VALUES[0], Field("index", torch.int8, 5)),
        (VALUES[0], Field("index", torch.uint8, 6)),
        (Field("values", torch.float32, 2), Field("index", torch.uint8, 1)),
        VALUES[::-1],
    ],
    ids=["name", "dtype", "length", "counts", "order"],
)
def test_frames_of_another_layout_are_refused(layout):
    other = Frames([layout], CPU)
    frames, _ = frame_of()
    assert other.nbytes == frames.nbytes
    assert not is_intact(other.outgoing, frames)


@pytest.mark.parametrize("count", [1, 2, 100, 2**14 + 1])
def test_checksum_is_its_definition_modulo_2_to_64(count):
    for low, high in [(-(2**63), 2**63), (-1, 0), (2**63 - 1, 2**63), (-(2**63), 1 - 2**63)]:
        words = np.random.default_rng(count).integers(low, high, (2, count))
        for found, row in zip(wire.checksum(torch.from_numpy(words)), words.tolist(), strict=True):
            total = sum((2 * i + 1) * word for i, word in enumerate(row))
            assert int(found) == (total + 2**63) % 2**64 - 2**63


def lengths_of(counts):
    more = Field("more", torch.int8, 3)
    return [(Field("values", torch.float32, count), more) for count in counts]


SEVERAL = {
    "equal": (lengths_of([4, 4, 4]), None),
    "unequal": (lengths_of([4, 40, 1]), None),
    "of several vectors": (lengths_of([4, 40, 1, 2]), [1, 0, 3]),
    "some empty": ([*lengths_of([4]), (), (Field("values", torch.float32, 0),)], None),
    "none": ([], None),
    "an empty one": ([()], None),
}


@pytest.mark.parametrize("case", SEVERAL)
@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("on_host", [True, False])
def test_frames_of_several_messages_are_packed_inspected_and_unpacked(
    case, checksum, on_host, monkeypatch
):
    monkeypatch.setattr(host, "can_read", lambda x: on_host)
    layouts, counts = SEVERAL[case]
    frames = Frames(layouts, CPU, checksum, counts)
    generator, rows, sent = torch.Generator().manual_seed(0), [], []
    for _ in range(3):
        messages = [
            tuple(torch.randint(99, (f.count,), generator=generator).to(f.dtype) for f in layout)
            for layout in layouts
        ]
        sent.append(messages)
        rows.append(frames.pack(messages).clone())
    assert [row.numel() for row in rows] == [frames.nbytes] * 3
    received = torch.stack(rows)
    for got, wanted in zip(frames.unpack(received), sent, strict=True):
        for parts, expected in zip(got, wanted, strict=True):
            assert all(map(torch.equal, parts, expected))
    if not frames.nbytes:
        return

    def differing():
        found = frames.headers(received)
        if found is None:
            return []
        return (found ^ frames.expected.repeat(3, 1)).any(1).nonzero().flatten().tolist()

    assert differing() == []
    each = sum(size > 0 for size in frames.sizes)
    last = frames.nbytes - max(size for size in frames.sizes[-1:] if size) if each > 1 else 0
    received[1, last] += 1
    assert differing() == [2 * each - 1]
