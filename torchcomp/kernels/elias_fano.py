"""Elias-Fano coding of k out of n indices in close to log2 C(n, k) bits.

Sources: Elias, "Efficient storage and retrieval by content and address of static files", JACM
1974; Fano, "On the number of bits required to implement an associative memory", MIT 1971; Vigna,
"Quasi-succinct indices", WSDM 2013.

docs/wire.md specifies the code: two bit vectors, the low part and then the high part, whose layout
depends on the width l of an entry's low part. Sender and receiver compute l, the width that gives
the fewest bytes, from n and k alone. Intact codes and sets of indices match one to one.

This plain torch has static shapes, so that the host never waits.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from torchcomp.kernels.segments import stacked


def nbytes(n: int, k: int) -> int:
    """Return the length in bytes of the code of any k of n indices; 0 <= k <= n < 2^56."""
    return 0 if k in (0, n) else _nbytes(n, k, low_bits(n, k))


@functools.lru_cache
def low_bits(n: int, k: int) -> int:
    """Return the width l of an entry's low part in bits; 0 means a bitmap."""
    # min() returns the first of several minima: the smallest width, as the format requires.
    return min(range(n.bit_length() + 1), key=functools.partial(_nbytes, n, k))


def _nbytes(n: int, k: int, low: int) -> int:
    high = k + ((n - 1) >> low) if low else n
    return _low_bytes(k, low) + (high + 7) // 8


def _low_bytes(k: int, low: int) -> int:
    return (k * low + 7) // 8


def check(ascending: bool, n: int) -> None:
    """Raise a ValueError unless the indices of `n` entries ascend strictly within [0, n)."""
    if not ascending:
        raise ValueError(
            f"Elias-Fano can encode only indices that ascend strictly within [0, {n}); check the "
            "selector that chose them"
        )


def encode(index: Tensor, n: int) -> Tensor:
    """Encode ascending indices below `n`. They are not checked."""
    k, device = index.numel(), index.device
    if k in (0, n):
        return index.new_empty(0, dtype=torch.uint8)
    low = low_bits(n, k)
    # One uint8 per bit until they are packed at the end: torch has no scatter of single bits.
    bits = torch.zeros(8 * nbytes(n, k), dtype=torch.uint8, device=device)
    high = index
    if low:
        each = (index[:, None] >> torch.arange(low, device=device)) & 1
        bits[: k * low].view(k, low).copy_(each)
        high = (index >> low) + torch.arange(k, device=device)
    bits.index_fill_(0, high + _low_bytes(k, low) * 8, 1)
    places = torch.arange(8, dtype=torch.uint8, device=device)
    return (bits.view(-1, 8) << places).sum(1, dtype=torch.uint8)


def decode(codes: Sequence[Tensor], n: int, k: int) -> tuple[Tensor, Tensor]:
    """Return the indices of codes, a row for each, and whether any code is damaged."""
    many, device = len(codes), codes[0].device
    each = torch.arange(k, device=device)
    if k in (0, n):
        return each.expand(many, k), torch.zeros((), dtype=torch.bool, device=device)
    low = low_bits(n, k)
    used, cut = k * low, _low_bytes(k, low) * 8
    places = torch.arange(8, dtype=torch.uint8, device=device)
    bits = ((stacked(codes)[:, :, None] >> places) & 1).view(many, -1)
    highs = bits[:, cut:]
    # nonzero() would make the host wait for the number of set bits. A damaged code can have another
    # number of them, so look for one more.
    at = torch.nonzero_static(highs.reshape(-1), size=many * k + 1, fill_value=-1).view(-1)
    index = at[:-1].view(many, k) - torch.arange(many, device=device)[:, None] * highs.shape[1]
    if low:
        parts = bits[:, :used].view(many, k, low) << torch.arange(low, device=device)
        index = ((index - each) << low) | parts.sum(2)
    inside = index.clamp(0, n - 1)
    # If all indices are below n and there are as many bits as entries, then each code has its own
    # bits, because the bits of one code cannot stand for an index in another one.
    padding = bits[:, used:cut] > 0
    wrong = [index != inside, index[:, 1:] <= index[:, :-1], padding, at[-1:] >= 0]
    return inside, torch.cat([flags.reshape(-1) for flags in wrong]).any()
