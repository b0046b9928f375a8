"""Headers of frames in Triton against the host's."""

import pytest
import torch

from torchcomp import wire
from torchcomp.kernels import checksum, checksum_triton

LENGTHS = [1, 8, 1000, 7, 4096, 3]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Make short frames use several blocks."""
    monkeypatch.setattr(checksum_triton, "_WORDS", 64)


def frames():
    """Return frames of several messages that are complete but for their checksums."""
    sizes = [wire.framed(length) for length in LENGTHS]
    spans = [slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
    out = torch.zeros(sum(sizes), dtype=torch.uint8)
    headers = wire.headers(LENGTHS, out.device)
    for length, span, header in zip(LENGTHS, spans, headers, strict=True):
        out[span][: wire.HEADER] = header[: wire.HEADER]
        wire.payload(out[span], length).random_(0, 256)
    return out, spans


def findings(form, *frames):
    signatures, checksums = form.inspect(*frames, LENGTHS)
    return list(map(wire.finding, signatures.tolist(), checksums.tolist()))


def test_sealed_frames_are_those_of_the_host():
    out, _ = frames()
    expected = out.clone()
    checksum.seal(expected, LENGTHS)
    checksum_triton.seal(out, LENGTHS)
    assert out.equal(expected)


def test_findings_are_those_of_the_host():
    out, spans = frames()
    checksum_triton.seal(out, LENGTHS)
    assert findings(checksum_triton, out) == [wire.INTACT] * len(LENGTHS)
    seen = set()
    for span in spans[1:4]:
        for byte in (0, 1, 8, wire.HEADER + 5):
            out[span.start + byte] ^= 64
            expected = findings(checksum, [out[each] for each in spans])
            assert findings(checksum_triton, out) == expected
            out[span.start + byte] ^= 64
            seen |= set(expected)
    assert seen == {wire.INTACT, wire.OTHER_VERSION, wire.OTHER_LENGTH, wire.DAMAGED}


def test_no_frames():
    none = torch.empty(0, dtype=torch.uint8)
    checksum_triton.seal(none, [])
    assert torch.cat(checksum_triton.inspect(none, [])).shape == (0,)
