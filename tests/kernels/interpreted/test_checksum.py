"""Headers of frames in Triton against the host's."""

import pytest
import torch

from torchcomp import wire
from torchcomp.kernels import checksum_triton

LENGTHS = [1, 8, 1000, 7, 4096, 3]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Make short frames use several blocks."""
    monkeypatch.setattr(checksum_triton, "_WORDS", 64)


def frames():
    """Frames without headers, one after another, and where each of them is."""
    sizes = [wire.framed(length) for length in LENGTHS]
    spans = [slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
    out = torch.zeros(sum(sizes), dtype=torch.uint8)
    for length, span in zip(LENGTHS, spans, strict=True):
        wire.payload(out[span], length).random_(0, 256)
    return out, spans


def test_sealed_frames_are_those_of_the_host():
    out, spans = frames()
    expected = out.clone()
    for length, span in zip(LENGTHS, spans, strict=True):
        wire.seal(expected[span], length)
    checksum_triton.seal(out, LENGTHS)
    assert out.equal(expected)


def test_findings_are_those_of_the_host():
    out, spans = frames()
    checksum_triton.seal(out, LENGTHS)
    found = checksum_triton.inspect(out, LENGTHS)
    assert (found.dtype, found.tolist()) == (torch.uint8, [wire.INTACT] * len(LENGTHS))
    seen = set()
    for span in spans[1:4]:
        for byte in (0, 1, 8, wire.HEADER + 5):
            out[span.start + byte] ^= 64
            expected = [
                int(wire.inspect(out[span], length))
                for length, span in zip(LENGTHS, spans, strict=True)
            ]
            assert checksum_triton.inspect(out, LENGTHS).tolist() == expected
            out[span.start + byte] ^= 64
            seen |= set(expected)
    assert seen == {wire.INTACT, wire.OTHER_VERSION, wire.OTHER_LENGTH, wire.DAMAGED}


def test_no_frames():
    none = torch.empty(0, dtype=torch.uint8)
    checksum_triton.seal(none, [])
    assert checksum_triton.inspect(none, []).shape == (0,)
