"""Elias-Fano: which k of n entries a message holds, near log2 C(n, k) bits.

Sources: Elias, "Efficient storage and retrieval by content and address of static files", JACM
1974; Fano, "On the number of bits required to implement an associative memory", MIT 1971; Vigna,
"Quasi-succinct indices", WSDM 2013.

The code of the indices x_0 < x_1 < ... < x_{k-1} below n is two bit vectors, one after the other.
Bit j of a vector is bit j mod 8 of its byte j div 8, counted from the lowest. Each vector ends with
zeros up to a whole byte.

    l = 0      no low part.
               high part: n bits, those at x_i are set.
    l >= 1     low part: k l bits, x_i mod 2^l in the bits i l, i l + 1, ..., lowest first.
               high part: k + ((n - 1) div 2^l) bits, those at (x_i div 2^l) + i are set.

Of all l, the one that takes the fewest bytes is meant; of several, the smallest. k = 0 and k = n
take no bytes. So both sides know the length, and all of the layout, from n and k alone. l = 0 is a
plain bitmap; it wins where more than about a fifth of the entries are kept.

Example: 5, 40, 41, 120 of n = 128, so k = 4. l = 0, 1, ..., 7 would take 16, 10, 6, 5, 4, 4, 4 and
5 bytes: l = 4. Low part, the indices mod 16: 5, 8, 9, 8, as bytes 0x85 0x89. High part, the indices
div 16: 0, 2, 2, 7, so bits 0, 3, 4 and 10 of 4 + 7 are set: 0x19 0x04.

A string of bytes is *intact* if some k of n are coded as it. The test: the high part has exactly k
bits set, the indices that it and the low part stand for ascend strictly and stay below n, and what
fills the low part's last byte is zero. So intact strings and sets match one to one.

In parallel: when encoding, the bits of an entry depend on the entry and its rank i alone. When
decoding, a prefix sum of the set bits of each word says which ranks a word of the high part holds.

On a CPU with Numba :mod:`.elias_fano_numba` does the work; elsewhere, accelerators included, plain
torch does, with the same results, in static shapes: nothing waits for an accelerator.
"""

import functools

import torch
from torch import Tensor

from torchcomp.kernels import backend


def nbytes(n: int, k: int) -> int:
    """Bytes that the code of any k of n indices takes; 0 <= k <= n < 2^56."""
    return 0 if k in (0, n) else _nbytes(n, k, low_bits(n, k))


@functools.lru_cache
def low_bits(n: int, k: int) -> int:
    """Width l of an entry's low part; 0 stands for a bitmap."""
    return min(range(n.bit_length() + 1), key=functools.partial(_nbytes, n, k))


def _nbytes(n: int, k: int, low: int) -> int:
    return (k * low + 7) // 8 + (_high_bits(n, k, low) + 7) // 8


def _high_bits(n: int, k: int, low: int) -> int:
    return k + ((n - 1) >> low) if low else n


def encode(index: Tensor, n: int) -> Tensor:
    """The code, 1-D uint8 of ``nbytes(n, k)`` elements, of k of n indices.

    `index` is 1-D int64, contiguous, strictly ascending and within [0, n). Raises ValueError if it
    is not, on a CPU; an accelerator would have to be waited for.
    """
    k, device = index.numel(), index.device
    if k in (0, n):
        return index.new_empty(0, dtype=torch.uint8)
    # Compiled kernels write to where indices point: a selector's error must not get that far.
    if device.type == "cpu" and not (
        index[0] >= 0 and index[-1] < n and (index[1:] > index[:-1]).all()
    ):
        raise ValueError(f"indices to encode must ascend strictly within [0, {n})")
    low, fast = low_bits(n, k), backend.fast_form("elias_fano", device.type)
    if fast is not None:
        out = torch.empty(nbytes(n, k), dtype=torch.uint8)
        fast.encode(index.numpy(), n, low, out.numpy())
        return out
    highs = torch.zeros(_high_bits(n, k, low), dtype=torch.uint8, device=device)
    highs[(index >> low) + torch.arange(k, device=device) if low else index] = 1
    lows = torch.empty(k, low, dtype=torch.uint8, device=device)
    for bit in range(low):
        lows[:, bit] = (index >> bit) & 1
    return torch.cat([_pack(lows.view(-1)), _pack(highs)])


def decode(raw: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """The indices that a code stands for, and whether it is intact.

    Args:
        raw: 1-D uint8, contiguous, of ``nbytes(n, k)`` elements; their values may be anything.
        n: number of entries that were chosen from.
        k: number of indices.

    Returns:
        1-D int64 of k strictly ascending indices within [0, n), and a scalar bool tensor. If that
        is true, :func:`encode` makes `raw` of them; else they are 0, 1, 2, ... and mean nothing.
    """
    if k in (0, n):
        return torch.arange(k, device=raw.device), torch.full((), True, device=raw.device)
    low, fast = low_bits(n, k), backend.fast_form("elias_fano", raw.device.type)
    if fast is not None:
        index = torch.empty(k, dtype=torch.int64)
        whole = fast.decode(raw.numpy(), n, low, index.numpy())
        return index if whole else torch.arange(k), torch.tensor(whole)
    first, cut = torch.arange(k, device=raw.device), (k * low + 7) // 8
    lows, highs = _unpack(raw[:cut]), _unpack(raw[cut:])
    index = torch.nonzero_static(highs, size=k, fill_value=0)[:, 0]
    if low:
        index = (index - first) << low
    for bit in range(low):
        index |= lows[bit : k * low : low].long() << bit
    intact = (highs.sum() == k) & (index[1:] > index[:-1]).all() & (lows[k * low :] == 0).all()
    # A bit in the high part's padding is a bucket beyond n, so this covers it too.
    intact = intact & (index[-1] < n)
    return index.where(intact, first), intact


def _pack(bits: Tensor) -> Tensor:
    """Bits, 0 or 1 as uint8, to bytes, with zeros up to a whole byte."""
    bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    return (bits << _places(bits)).sum(1, dtype=torch.uint8)


def _unpack(raw: Tensor) -> Tensor:
    """The bits of bytes, as uint8."""
    return ((raw[:, None] >> _places(raw)) & 1).view(-1)


def _places(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
