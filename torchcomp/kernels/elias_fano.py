"""Elias-Fano coding of k out of n indices in close to log2 C(n, k) bits.

Sources: Elias, "Efficient storage and retrieval by content and address of static files", JACM
1974; Fano, "On the number of bits required to implement an associative memory", MIT 1971; Vigna,
"Quasi-succinct indices", WSDM 2013.

The code of the indices x_0 < x_1 < ... < x_{k-1} below n is two bit vectors, the low part and then
the high part. Bit j of a vector is bit j mod 8 of its byte j div 8, counted from the lowest. Each
vector is padded with zeros to a whole byte. The width l of an entry's low part decides the layout:

    l = 0      no low part.
               high part: n bits, those at x_i are set.
    l >= 1     low part: k l bits, x_i mod 2^l in the bits i l, i l + 1, ..., lowest first.
               high part: k + ((n - 1) div 2^l) bits, those at (x_i div 2^l) + i are set.

l is the width that gives the fewest bytes, and the smallest such width in a tie. k = 0 and k = n
take no bytes. Sender and receiver therefore compute the length and the layout from n and k alone.
l = 0 is a plain bitmap. It is the shortest if more than about a fifth of the entries are kept.

Example: the indices 5, 40, 41, 120 of n = 128, so k = 4.

- l = 0, 1, ..., 7 would take 16, 10, 6, 5, 4, 4, 4 and 5 bytes. The choice is l = 4.
- Low part, the indices mod 16: 5, 8, 9, 8. The bytes are 0x85 0x89.
- High part, the indices div 16: 0, 2, 2, 7. Bits 0, 3, 4 and 10 of 4 + 7 are set: 0x19 0x04.

A byte string is *intact* if it is the code of some k of n indices. :func:`decode` tests that

- the high part has exactly k bits set;
- the decoded indices ascend strictly and stay below n;
- the padding of the low part's last byte is zero.

Intact strings and index sets match one to one.

Both directions can run in parallel. When encoding, the bits of an entry depend only on the entry
and its position i. When decoding, a prefix sum over the set bits of each word of the high part
gives the positions of its entries.

On a CPU with Numba, :mod:`.elias_fano_numba` runs. Everywhere else, accelerators included, plain
torch runs, with the same results. It uses static shapes, so the host never waits for an
accelerator.
"""

import functools

import torch
from torch import Tensor

from torchcomp import host
from torchcomp.kernels import backend


def nbytes(n: int, k: int) -> int:
    """Return the length in bytes of the code of any k of n indices; 0 <= k <= n < 2^56."""
    return 0 if k in (0, n) else _nbytes(n, k, low_bits(n, k))


@functools.lru_cache
def low_bits(n: int, k: int) -> int:
    """Return the width l of an entry's low part in bits; 0 means a bitmap."""
    # min() returns the first of several minima: the smallest width, as the format requires.
    return min(range(n.bit_length() + 1), key=functools.partial(_nbytes, n, k))


def _nbytes(n: int, k: int, low: int) -> int:
    return (k * low + 7) // 8 + (_high_bits(n, k, low) + 7) // 8


def _high_bits(n: int, k: int, low: int) -> int:
    return k + ((n - 1) >> low) if low else n


def encode(index: Tensor, n: int) -> Tensor:
    """Encode k of n indices.

    Args:
        index: 1-D int64 of k elements, contiguous, strictly ascending and within [0, n).
        n: number of entries that the indices were chosen from.

    Returns:
        The code: 1-D uint8, ``nbytes(n, k)`` elements.

    Raises:
        ValueError: on a CPU, if the indices do not ascend strictly within [0, n). Indices on an
            accelerator are not checked.
    """
    k, device = index.numel(), index.device
    if k in (0, n):
        return index.new_empty(0, dtype=torch.uint8)
    # Compiled kernels do not check bounds: after a bug in a selector they would write to arbitrary
    # memory. On an accelerator the check would make the host wait.
    if host.can_read(index) and not (
        index[0] >= 0 and index[-1] < n and (index[1:] > index[:-1]).all()
    ):
        raise ValueError(
            f"Elias-Fano can encode only indices that ascend strictly within [0, {n}); check the "
            "selector that chose them"
        )
    low, fast = low_bits(n, k), backend.fast_form("elias_fano", device.type)
    if fast is not None:
        out = torch.empty(nbytes(n, k), dtype=torch.uint8)
        fast.encode(index.numpy(), n, low, out.numpy())
        return out
    # Both parts have one uint8 per bit until they are packed at the end. Plain torch has no scatter
    # of single bits.
    highs = torch.zeros(_high_bits(n, k, low), dtype=torch.uint8, device=device)
    highs[(index >> low) + torch.arange(k, device=device) if low else index] = 1
    lows = torch.empty(k, low, dtype=torch.uint8, device=device)
    for bit in range(low):
        lows[:, bit] = (index >> bit) & 1
    return torch.cat([_pack(lows.view(-1)), _pack(highs)])


def decode(raw: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Decode the indices of a code, and test whether the code is intact.

    Args:
        raw: 1-D uint8, contiguous, ``nbytes(n, k)`` elements of any value.
        n: number of entries that the indices were chosen from.
        k: number of indices.

    Returns:
        The indices, 1-D int64, k elements, strictly ascending within [0, n); and a scalar bool
        tensor. If it is true, :func:`encode` turns the indices back into `raw`. If it is false,
        the code is damaged and the indices are a placeholder: 0, 1, 2, ...
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
    # nonzero() would make the host wait for the number of set bits. A damaged code can have another
    # number of them: then the result is cut or filled up, and `intact` is false.
    index = torch.nonzero_static(highs, size=k, fill_value=0)[:, 0]
    if low:
        index = (index - first) << low
    for bit in range(low):
        index |= lows[bit : k * low : low].long() << bit
    intact = (highs.sum() == k) & (index[1:] > index[:-1]).all() & (lows[k * low :] == 0).all()
    # This also covers the high part's padding: a bit set there decodes to an index of at least n.
    intact = intact & (index[-1] < n)
    return index.where(intact, first), intact


def _pack(bits: Tensor) -> Tensor:
    """Pack bits, 0 or 1 as uint8, into bytes. Pad with zeros to a whole byte."""
    bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    return (bits << _bit_positions(bits)).sum(1, dtype=torch.uint8)


def _unpack(raw: Tensor) -> Tensor:
    """Unpack bytes into bits, 0 or 1 as uint8."""
    return ((raw[:, None] >> _bit_positions(raw)) & 1).view(-1)


def _bit_positions(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
