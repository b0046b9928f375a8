"""The checksum of a frame is the same number on the host and on the device."""

import numpy as np
import pytest
import torch

from torchcomp import wire


def plain(words):
    """The definition in Python integers, returned as a signed 64-bit number."""
    total = sum((2 * i + 1) * word for i, word in enumerate(words.tolist()) if i != 1)
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("count", [2, 3, 100, 2**14 - 1, 2**14, 2**14 + 1, 3 * 2**14 + 5])
def test_both_forms_are_the_definition(count):
    for low, high in [(-(2**63), 2**63), (-1, 0), (2**63 - 1, 2**63), (-(2**63), 1 - 2**63)]:
        words = np.random.default_rng(count).integers(low, high, count)
        assert wire._checksum(words) == plain(words)
        assert wire._checksum_on_device(torch.from_numpy(words)) == plain(words)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 1000, 2**17 + 3])
def test_a_sealed_frame_is_intact_until_a_bit_changes(length):
    generator = np.random.default_rng(length)
    frame = torch.from_numpy(generator.integers(0, 256, wire.framed(length), dtype=np.uint8))
    wire.seal(frame, length)
    assert wire.inspect(frame, length) == wire.INTACT
    for byte in [0, 1, 2, 7, 8, 15, frame.numel() // 2, frame.numel() - 1]:
        frame[byte] ^= 16
        assert int(wire.inspect(frame, length)) != wire.INTACT
        frame[byte] ^= 16
    assert int(wire.inspect(frame, length)) == wire.INTACT
