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

On a CPU with Numba, :mod:`.elias_fano_numba` runs. On CUDA with Triton, the kernels of
:mod:`.sparse_triton` run, and everywhere else :mod:`.elias_fano_torch`, with the same results.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from torchcomp.kernels import elias_fano_torch
from torchcomp.kernels.segments import Segment, split


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


def check(ascending: bool, n: int) -> None:
    """Raise a ValueError unless the indices of `n` entries ascend strictly within [0, n)."""
    # Callers then use the indices in compiled kernels, which do not check bounds.
    if not ascending:
        raise ValueError(
            f"Elias-Fano can encode only indices that ascend strictly within [0, {n}); check the "
            "selector that chose them"
        )


def encode(index: Tensor, segments: Sequence[Segment]) -> list[Tensor]:
    """Encode the indices of all segments at once. The indices are not checked.

    Args:
        index: 1-D int64, within the whole vector, segment by segment. Strictly ascending in each.
        segments: the parts of the vector.

    Returns:
        The codes of the segments: 1-D uint8, ``nbytes(n, k)`` elements each.
    """
    coded = [segment for segment in segments if 0 < segment.k < segment.n]
    if not coded:
        return [index.new_empty(0, dtype=torch.uint8) for _ in segments]
    if len(coded) < len(segments):
        parts = zip(split(index, [segment.k for segment in segments]), segments, strict=True)
        index = torch.cat([part for part, segment in parts if 0 < segment.k < segment.n])
    codes = elias_fano_torch.encode(index, _shape(coded))
    return list(split(codes, [nbytes(segment.n, segment.k) for segment in segments]))


def decode(codes: Sequence[Tensor], segments: Sequence[Segment]) -> tuple[Tensor, Tensor]:
    """Decode the codes of all segments at once, and test whether they are intact.

    Args:
        codes: the code of each segment, 1-D uint8, ``nbytes(n, k)`` elements of any value.
        segments: the parts of the vector, at least one. They can overlap.

    Returns:
        The indices within the whole vector, 1-D int64, segment by segment; and a scalar bool
        tensor, whether a code is damaged. If none is, :func:`encode` turns the indices back into
        the codes. Otherwise the indices are placeholders within their segments.
    """
    device = codes[0].device
    coded = [i for i, segment in enumerate(segments) if 0 < segment.k < segment.n]
    whole = [segments[i] for i in coded]
    if len(coded) == len(segments):
        return elias_fano_torch.decode(codes, _shape(segments))
    damaged = torch.zeros((), dtype=torch.bool, device=device)
    index = torch.empty(0, dtype=torch.int64, device=device)
    if coded:
        index, damaged = elias_fano_torch.decode([codes[i] for i in coded], _shape(whole))
    found = dict(zip(coded, split(index, [segment.k for segment in whole]), strict=True))
    every = [
        found[i] if i in found else torch.arange(at, at + k, device=device)
        for i, (at, _, k) in enumerate(segments)
    ]
    return torch.cat(every), damaged


def _shape(segments: Sequence[Segment]) -> elias_fano_torch.Shape:
    low = [low_bits(segment.n, segment.k) for segment in segments]
    high = [_high_bits(n, k, bits) for (_, n, k), bits in zip(segments, low, strict=True)]
    return elias_fano_torch.Shape(segments, low, high)
