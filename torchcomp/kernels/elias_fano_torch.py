"""Elias-Fano in plain torch, for any device: static shapes, nothing waits for an accelerator."""

import torch
from torch import Tensor


def encode(index: Tensor, n: int, low: int) -> Tensor:
    """The code of 0 < k < n indices with low parts of `low` bits; see :mod:`.elias_fano`."""
    k = index.numel()
    highs = torch.zeros(k + ((n - 1) >> low) if low else n, dtype=torch.uint8, device=index.device)
    highs[_positions(index, low)] = 1
    lows = torch.empty(k, low, dtype=torch.uint8, device=index.device)
    for bit in range(low):
        lows[:, bit] = (index >> bit) & 1
    return torch.cat([_pack(lows.view(-1)), _pack(highs)])


def _positions(index: Tensor, low: int) -> Tensor:
    """Where the high part has its set bits."""
    if not low:
        return index
    return (index >> low) + torch.arange(index.numel(), device=index.device)


def decode(raw: Tensor, n: int, k: int, low: int) -> tuple[Tensor, Tensor]:
    """Inverse of :func:`encode`: the indices, and whether `raw` is intact; 0, 1, 2, ... if not."""
    cut = (k * low + 7) // 8
    lows, highs = _unpack(raw[:cut]), _unpack(raw[cut:])
    index = _buckets(highs, k, low) << low
    for bit in range(low):
        index |= lows[bit : k * low : low].long() << bit
    intact = (highs.sum() == k) & (index[1:] > index[:-1]).all() & (lows[k * low :] == 0).all()
    # A bit in the high part's padding is a bucket beyond n, so this covers it too.
    intact = intact & (index[-1] < n)
    return index.where(intact, torch.arange(k, device=index.device)), intact


def _buckets(highs: Tensor, k: int, low: int) -> Tensor:
    """What :func:`_positions` was made of, without the low bits."""
    at = torch.nonzero_static(highs, size=k, fill_value=0)[:, 0]
    return at - torch.arange(k, device=at.device) if low else at


def _pack(bits: Tensor) -> Tensor:
    """Bits, 0 or 1 as uint8, to bytes, with zeros up to a whole byte."""
    bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    return (bits << _places(bits)).sum(1, dtype=torch.uint8)


def _unpack(raw: Tensor) -> Tensor:
    """The bits of bytes, as uint8."""
    return ((raw[:, None] >> _places(raw)) & 1).view(-1)


def _places(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
