"""Elias-Fano: the bytes, the size, and the one-to-one match of sets and intact strings."""

import itertools
import math

import numpy as np
import pytest
import torch

from tests.kernels.definitions import BIG, EXAMPLES, some_of
from tests.kernels.forms import sparse_kernels, use_form
from tests.support.cases import thorough
from torchcomp.kernels import backend, elias_fano

BACKENDS = ["torch", "numba"]


@pytest.fixture(params=[*BACKENDS, *(["cuda"] if torch.cuda.is_available() else [])])
def device(request, monkeypatch):
    """Run a test on every backend. The value is the device for its tensors."""
    if request.param == "cuda":
        return "cuda"
    use_form(request.param, "sparse", monkeypatch)
    return "cpu"


def encode(index, n):
    """Encode in the form of the test."""
    k, form = index.numel(), backend.fast_form("elias_fano", "cpu" if index.is_cpu else "")
    if form is None or k in (0, n):
        return elias_fano.encode(index, n)
    out = torch.empty(elias_fano.nbytes(n, k), dtype=torch.uint8)
    elias_fano.check(form.encode(index.numpy(), n, elias_fano.low_bits(n, k), out.numpy()), n)
    return out


def decode(code, n, k):
    """Decode in the form of the test: return the indices, and whether the code is intact."""
    form = backend.fast_form("elias_fano", "cpu" if code.is_cpu else "")
    if form is None or k in (0, n):
        (index,), damaged = elias_fano.decode([code], n, k)
        return index, ~damaged
    index = np.zeros(k, np.int64)
    intact = form.decode(code.numpy(), n, elias_fano.low_bits(n, k), index)
    return torch.from_numpy(index) if intact else torch.arange(k), torch.tensor(intact)


def raw(content, device="cpu"):
    return torch.tensor(list(content), dtype=torch.uint8, device=device)


@pytest.mark.parametrize(("chosen", "n", "expected"), EXAMPLES)
def test_worked_examples(device, chosen, n, expected):
    code = encode(torch.tensor(chosen, dtype=torch.int64, device=device), n)
    assert (code.dtype, code.device.type) == (torch.uint8, device)
    assert bytes(code.tolist()) == bytes.fromhex(expected)
    index, intact = decode(raw(bytes.fromhex(expected), device), n, len(chosen))
    assert (intact.dtype, intact.shape, bool(intact)) == (torch.bool, (), True)
    assert (index.dtype, index.device.type, index.tolist()) == (torch.int64, device, chosen)


@pytest.mark.parametrize(("ratio", "factor"), [(0.001, 1.10), (0.01, 1.10), (0.1, 1.15)])
@pytest.mark.parametrize("n", [20_000, 65_537, 10**6, 2**20, 25_557_032, BIG, 10**11])
def test_the_size_is_near_the_information_bound(n, ratio, factor):
    k = math.ceil(ratio * n)
    nats = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    bound = nats / math.log(2)  # log2 C(n, k)
    # Both parts are padded to whole bytes. With few entries, these 14 bits exceed the factor.
    assert bound <= 8 * elias_fano.nbytes(n, k) <= factor * bound + 14


@pytest.mark.parametrize("k", [0, 1, 200, 300, 500, 900, 999, 1000])
def test_it_never_takes_more_than_a_bitmap(k):
    assert elias_fano.nbytes(1000, k) <= (0 if k in (0, 1000) else 125)
    assert (elias_fano.nbytes(1000, k) == 125) == (300 <= k < 1000)


# --- Sets and intact strings match one to one -----------------------------------------------------


TINY = [(n, k) for n in range(9) for k in range(n + 1)]


@pytest.mark.parametrize("shapes", [TINY, *thorough([[(40, 2)]])], ids=["bitmaps", "low parts"])
def test_of_all_strings_exactly_the_codes_are_intact(device, shapes):
    for n, k in shapes:
        sets = (torch.tensor(s, dtype=torch.int64) for s in itertools.combinations(range(n), k))
        codes = {bytes(encode(s.to(device), n).tolist()) for s in sets}
        assert len(codes) == math.comb(n, k)
        strings = map(bytes, itertools.product(range(256), repeat=elias_fano.nbytes(n, k)))
        intact = {s for s in strings if decode(raw(s, device), n, k)[1]}
        assert intact == codes, (n, k)


SHAPES = [(64, 9), (100, 1), (100, 60), (1000, 10), (4096, 64), (70_000, 3), (BIG, 4)]
WIDTHS = [(2**14 << low // 2, 2**14 << low // 2 >> low) for low in range(1, 22)]
MANY = [(BIG, 1), (2**55, 7), (10**5, 99_999), (4 * 10**5, 140_000), (BIG, 140_000)]


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_flipped_bit_gives_another_set_or_is_found(device, n, k):
    chosen = some_of(n, k).to(device)
    code = encode(chosen, n)
    low_part = k * elias_fano.low_bits(n, k)
    for bit in range(8 * code.numel()):
        flipped = code.clone()
        flipped[bit // 8] ^= 1 << bit % 8
        index, intact = decode(flipped, n, k)
        assert 0 <= index.min() <= index.max() < n
        assert not intact or encode(index, n).equal(flipped)
        assert not (intact and index.equal(chosen))
        assert not (intact and bit >= low_part), "the number of set bits has changed"


@pytest.mark.parametrize("form", BACKENDS)
@pytest.mark.parametrize("chosen", [[-1, 3], [3, 3], [4, 3], [3, 100], [0, -1], [-(2**63), 0]])
def test_indices_out_of_order_or_range_are_refused(form, monkeypatch, chosen):
    use_form(form, "sparse", monkeypatch)
    # Numba's form reads the values first, and torch finds what is outside of the tensor.
    with pytest.raises((ValueError, IndexError), match=r"Elias-Fano.*\[0, 100\)|out of range"):
        sparse_kernels((100, 100, 2)).encode(torch.zeros(300), torch.tensor(chosen) + 100, None)


@pytest.mark.parametrize(("n", "k"), [*WIDTHS, (2**32, 1000), (2**32 - 2**27, 1000)])
def test_entries_swapped_within_a_bucket_are_found(device, n, k):
    """The high part does not change, so only the order of the low parts shows the damage."""
    chosen, low = some_of(n, k), elias_fano.low_bits(n, k)
    buckets = chosen >> low
    neighbours = torch.nonzero(buckets[1:] == buckets[:-1]).view(-1).tolist() if low else []
    bits = np.unpackbits(encode(chosen, n).numpy(), bitorder="little")
    for rank in neighbours[:3] + neighbours[-3:]:
        first, second = (slice(low * i, low * (i + 1)) for i in (rank, rank + 1))
        swapped = bits.copy()
        swapped[first], swapped[second] = bits[second], bits[first]
        assert not decode(raw(np.packbits(swapped, bitorder="little"), device), n, k)[1]


@pytest.mark.parametrize(("n", "k"), [*SHAPES, *MANY, *WIDTHS])
def test_vectors_of_all_sizes_have_the_code_of_the_reference_and_survive(device, n, k):
    chosen = some_of(n, k)
    chosen[-1] = n - 1
    code = encode(chosen.to(device), n)
    assert code.cpu().equal(elias_fano.encode(chosen, n))
    index, intact = decode(code, n, k)
    assert intact
    assert index.cpu().equal(chosen)
