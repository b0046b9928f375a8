"""Elias-Fano coding in Triton: the bytes of the specification, and damaged codes."""

import numpy as np
import pytest
import torch

from tests.kernels.test_elias_fano import BIG, EXAMPLES, WIDTHS, some_of
from tests.support.cases import only, some
from torchcomp.kernels import elias_fano_triton
from torchcomp.kernels.elias_fano import low_bits, nbytes
from torchcomp.kernels.elias_fano_triton import decode, encode


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Make short codes use several blocks: the interpreter is slow."""
    monkeypatch.setattr(elias_fano_triton, "_ENTRIES", 64)
    monkeypatch.setattr(elias_fano_triton, "_BITS", 256)


def packed(bits):
    return np.packbits(np.array(bits, dtype=np.uint8), bitorder="little").tolist()


def specified(chosen, n):
    """The code, bit by bit."""
    k = len(chosen)
    if k in (0, n):
        return []
    low = low_bits(n, k)
    lows = [value >> bit & 1 for value in chosen for bit in range(low)]
    # With the padding, so that invalid indices have a code as well.
    highs = [0] * (-(-(k + ((n - 1) >> low) if low else n) // 8) * 8)
    for i, value in enumerate(chosen):
        highs[(value >> low) + i if low else value] = 1
    return packed(lows) + packed(highs)


def several(subsets, gap=3):
    """Segments of (indices, n) pairs: their positions, byte offsets, codes and indices."""
    segments, offsets, content, positions, start = [], [], [9], [], 7
    for chosen, n in subsets:
        segments.append((start, n, len(chosen)))
        offsets.append(len(content))
        content += specified(chosen, n) + [0] * gap
        positions += [start + value for value in chosen]
        start += n
    return segments, offsets, torch.tensor(content, dtype=torch.uint8), torch.tensor(positions)


def check_both_ways(subsets, dtype=torch.int64):
    segments, offsets, content, positions = several(subsets)
    index, out = positions.to(dtype), torch.zeros_like(content)
    out[0] = 9
    encode(index, segments, offsets, out)
    assert out.equal(content)
    decoded = torch.full_like(index, -1)
    broken = decode(content, segments, offsets, decoded)
    assert (broken.dtype, broken.shape) == (torch.bool, ())
    assert not broken
    assert decoded.equal(index)


@pytest.mark.parametrize(("chosen", "n", "expected"), EXAMPLES)
def test_worked_examples(chosen, n, expected):
    assert bytes(specified(chosen, n)) == bytes.fromhex(expected)
    check_both_ways([(chosen, n)])


SHAPES = [(64, 9), (100, 1), (100, 60), (1000, 10), (4096, 64), (400, 399), (3, 0), (1, 1)]


def subset(n, k, seed=0):
    return (some_of(n, k, seed).tolist() if k else []), n


@pytest.mark.parametrize("dtype", only([torch.int32, torch.int64], now=[torch.int32]))
def test_many_segments_in_one_call(dtype):
    check_both_ways([subset(n, k, seed) for seed in range(2) for n, k in SHAPES], dtype)


def test_segments_without_any_entry():
    for segments in ([], [(0, 5, 0), (5, 7, 0)]):
        empty = torch.empty(0, dtype=torch.int64)
        raw = torch.empty(0, dtype=torch.uint8)
        encode(empty, segments, [0] * len(segments), raw)
        assert not decode(raw, segments, [0] * len(segments), empty)


def test_all_entries_of_a_long_segment_are_kept():
    check_both_ways([(list(range(1000)), 1000), ([3], 9)])


@pytest.mark.parametrize("shape", some(WIDTHS, of=4))
def test_low_parts_of_every_width(shape):
    n, k = shape[0] // 64 + 2, shape[1] // 64 + 1
    check_both_ways([subset(n, k), subset(n, k, 1)])


def test_vectors_longer_than_32_bits():
    shapes = [(BIG, 5), (2**40, 7)]
    subsets = []
    for n, k in shapes:
        chosen = some_of(n, k).tolist()
        subsets.append(([*chosen[:-1], n - 1], n))
    check_both_ways(subsets)


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_codes_may_begin_at_any_address(shift):
    segments, offsets, content, positions = several([subset(100, 20)])
    room = torch.zeros(content.numel() + 8, dtype=torch.uint8)
    out = room[shift : shift + content.numel()]
    encode(positions, segments, offsets, out)
    assert out[1:].equal(content[1:])
    assert not room[:shift].any()
    assert not room[shift + content.numel() :].any()


# --- Damage ---------------------------------------------------------------------------------------


def is_code(raw, n, k):
    """The specification: whether bytes are the code of some k of n indices."""
    low = low_bits(n, k)
    bits = np.unpackbits(np.array(raw, dtype=np.uint8), bitorder="little").astype(np.int64)
    cut = (k * low + 7) // 8 * 8
    places = np.flatnonzero(bits[cut:])
    if len(places) != k or bits[k * low : cut].any():
        return False
    lows = bits[: k * low].reshape(k, low) @ (1 << np.arange(low)) if low else 0
    index = ((places - np.arange(k)) << low) + lows if low else places
    return bool((np.diff(index) > 0).all() and index[-1] < n)


def damaged(n, k, generator):
    length = nbytes(n, k)
    code = np.array(specified(*subset(n, k)), dtype=np.uint8)
    for flips in [1, 2] * 6:
        raw = code.copy()
        for bit in generator.integers(0, 8 * length, flips):
            raw[bit // 8] ^= 1 << bit % 8
        yield raw
    for density in (0.1, 0.3, 0.5, 0.9):
        yield np.packbits(generator.random(8 * length) < density)
    yield np.zeros(length, np.uint8)
    yield np.full(length, 255, np.uint8)


CODES = [(40, 2), (64, 9), (100, 60), (1000, 10), (2000, 100)]


@pytest.mark.parametrize("code", only(CODES, now=[(40, 2), (1000, 10)]), ids=str)
def test_damage_is_found_and_the_indices_stay_within_bounds(code):
    n, k = code
    sound, verdicts = specified(*subset(50, 5)), []
    for raw in damaged(n, k, np.random.default_rng(n)):
        content = torch.tensor(sound + raw.tolist() + sound, dtype=torch.uint8)
        segments = [(0, 50, 5), (50, n, k), (50 + n, 50, 5)]
        offsets = [0, len(sound), len(sound) + len(raw)]
        index = torch.full((k + 10,), -1)
        broken = decode(content, segments, offsets, index)
        assert bool(broken) != is_code(raw, n, k)
        assert (index[5:-5] >= 50).all()
        assert (index[5:-5] < 50 + n).all()
        assert index[:5].tolist() == subset(50, 5)[0]
        assert (index[-5:] - 50 - n).tolist() == subset(50, 5)[0]
        verdicts.append(not broken)
    assert not all(verdicts)


@pytest.mark.parametrize(
    ("chosen", "n"),
    [
        ([10, 10, 300, 999], 1000),
        ([11, 10, 300, 999], 1000),
        ([1, 2, 3, 1000], 1000),  # their high parts fit, as 1000 is not a multiple of 2^l
        ([0, 1, 2, 3, 4, 12], 12),  # a bitmap
    ],
)
def test_indices_that_do_not_ascend_below_n_are_found(chosen, n):
    raw = specified(chosen, n)
    assert len(raw) == nbytes(n, len(chosen))
    assert not is_code(raw, n, len(chosen))
    index = torch.full((len(chosen),), -1)
    assert decode(torch.tensor(raw, dtype=torch.uint8), [(0, n, len(chosen))], [0], index)
    assert (index >= 0).all()
    assert (index < n).all()
