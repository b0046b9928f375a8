"""The checksum of a frame is the same number on the host and on the device."""

import numpy as np
import pytest
import torch

from tests.support.codecs import inspected, sealed
from torchcomp import host, wire


def plain(words):
    """The definition in Python integers, returned as a signed 64-bit number."""
    total = sum((2 * i + 1) * word for i, word in enumerate(words.tolist()) if i != 1)
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("count", [2, 3, 100, 2**14 - 1, 2**14, 2**14 + 1, 3 * 2**14 + 5])
def test_both_forms_are_the_definition(count):
    for low, high in [(-(2**63), 2**63), (-1, 0), (2**63 - 1, 2**63), (-(2**63), 1 - 2**63)]:
        words = np.random.default_rng(count).integers(low, high, count)
        assert wire._checksum(words) == plain(words)


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("length", [1, 7, 8, 1000, 2**17 + 3])
def test_a_sealed_frame_is_intact_until_a_bit_changes(length, on_host, monkeypatch):
    monkeypatch.setattr(host, "can_read", lambda x: on_host)
    generator = np.random.default_rng(length)
    frame = sealed(torch.from_numpy(generator.integers(0, 256, length, dtype=np.uint8)))
    assert inspected(frame, length) == wire.INTACT
    words = frame.numpy().view(np.int64).copy()
    words[1] = plain(words)
    assert (frame.numpy().view(np.int64) == words).all()
    for byte in [0, 1, 2, 7, 8, 15, frame.numel() // 2, frame.numel() - 1]:
        frame[byte] ^= 16
        assert inspected(frame, length) != wire.INTACT
        frame[byte] ^= 16
    assert inspected(frame, length) == wire.INTACT


def test_frames_of_several_lengths_are_sealed_and_inspected_at_once(monkeypatch):
    generator, lengths = np.random.default_rng(0), [5, 800, 1, 16, 16]
    messages = [torch.from_numpy(generator.integers(0, 256, n, dtype=np.uint8)) for n in lengths]
    separately = [sealed(message) for message in messages]
    monkeypatch.setattr(host, "can_read", lambda x: False)
    sizes = [frame.numel() for frame in separately]
    frames = torch.cat(separately)
    for frame in torch.split(frames, sizes):
        frame[8:16] = 0
    wire.seal(frames, sizes)
    assert frames.equal(torch.cat(separately))
    received = list(torch.split(frames, sizes))
    assert not wire.inspect(received, lengths).any()
    received[1][700] ^= 1
    received[2][0] += 1
    found = [wire.finding(row) for row in wire.inspect(received, [5, 800, 1, 16, 15]).tolist()]
    assert found == [0, wire.DAMAGED, wire.OTHER_VERSION, 0, wire.OTHER_LENGTH]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_host_and_device_seal_to_the_same_bytes_and_the_host_never_waits():
    message = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    there = message.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        frame = sealed(there)
        found = wire.inspect([frame], [1000])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not found.any()
    assert frame.cpu().equal(sealed(message))
