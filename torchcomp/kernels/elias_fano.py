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
torch does (:mod:`.elias_fano_torch`), with the same results.
"""

import functools
from types import ModuleType

import torch
from torch import Tensor

from torchcomp.kernels import elias_fano_torch
from torchcomp.kernels.backend import numba_form


def nbytes(n: int, k: int) -> int:
    """Bytes that the code of any k of n indices takes; 0 <= k <= n < 2^56."""
    return 0 if k in (0, n) else _nbytes(n, k, low_bits(n, k))


@functools.lru_cache
def low_bits(n: int, k: int) -> int:
    """Width l of an entry's low part; 0 stands for a bitmap."""
    return min(range(n.bit_length() + 1), key=functools.partial(_nbytes, n, k))


def _nbytes(n: int, k: int, low: int) -> int:
    high = k + ((n - 1) >> low) if low else n
    return (k * low + 7) // 8 + (high + 7) // 8


def encode(index: Tensor, n: int) -> Tensor:
    """The code of a set of indices.

    Args:
        index: 1-D int64, strictly ascending, within [0, n).
        n: number of entries that were chosen from.

    Returns:
        1-D uint8 of ``nbytes(n, k)`` elements, k being the number of indices.

    Raises:
        ValueError: on a CPU, if the indices are not as above. An accelerator does not look.
    """
    k = index.numel()
    if k in (0, n):
        return index.new_empty(0, dtype=torch.uint8)
    low, fast = low_bits(n, k), _fast(index)
    if fast is not None:
        out = torch.empty(nbytes(n, k), dtype=torch.uint8)
        _require(fast.encode(index.to(torch.int64).contiguous(), n, low, out), n)
        return out
    if index.device.type == "cpu":
        _require(_ascends(index, n), n)
    return elias_fano_torch.encode(index, n, low)


def _ascends(index: Tensor, n: int) -> bool:
    inside = index[0] >= 0 and index[-1] < n
    return bool(inside and (index[1:] > index[:-1]).all())


def _require(ascends: bool, n: int) -> None:
    if not ascends:
        raise ValueError(f"indices to encode must ascend strictly within [0, {n})")


def decode(raw: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """The indices that a code stands for, and whether it is intact.

    Args:
        raw: 1-D uint8 of ``nbytes(n, k)`` elements; their values may be anything.
        n: number of entries that were chosen from.
        k: number of indices.

    Returns:
        1-D int64 of k strictly ascending indices within [0, n), and a scalar bool tensor. If that
        is true, :func:`encode` makes `raw` of them; else they are 0, 1, 2, ... and mean nothing.

    Raises:
        ValueError: if `raw` has another length.
    """
    check_length(raw, n, k)
    if k in (0, n):
        index = torch.arange(k, device=raw.device)
        return index, torch.ones((), dtype=torch.bool, device=raw.device)
    low, fast = low_bits(n, k), _fast(raw)
    if fast is None:
        return elias_fano_torch.decode(raw, n, k, low)
    index = torch.empty(k, dtype=torch.int64)
    intact = fast.decode(raw.contiguous().numpy(), n, low, index.numpy())
    return index, torch.tensor(intact)


def check_length(raw: Tensor, n: int, k: int) -> None:
    """Require as many bytes as the code of k of n indices takes.

    Raises:
        ValueError: if there are more or fewer.
    """
    if raw.numel() != nbytes(n, k):
        raise ValueError(
            f"the code of {k} of {n} indices takes {nbytes(n, k)} bytes, not {raw.numel()}"
        )


def _fast(tensor: Tensor) -> ModuleType | None:
    """The module that works on this tensor faster than plain torch, if any."""
    return numba_form("elias_fano") if tensor.device.type == "cpu" else None
