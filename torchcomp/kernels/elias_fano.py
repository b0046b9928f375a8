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

On a CPU with Numba, :mod:`.elias_fano_numba` runs. On CUDA with Triton, :mod:`.elias_fano_triton`
runs, and everywhere else :mod:`.elias_fano_torch`, with the same results.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from torchcomp import host
from torchcomp.kernels import backend, elias_fano_torch
from torchcomp.kernels.segments import Segment, split, starts, within


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
    k = index.numel()
    if k in (0, n):
        return index.new_empty(0, dtype=torch.uint8)
    if not host.can_read(index):
        return encode_all(index, [Segment(0, n, k)])[0]
    fast = backend.host_form("elias_fano", index)
    if fast is None:
        ascending = index[0] >= 0 and index[-1] < n and bool((index[1:] > index[:-1]).all())
    else:
        out = torch.empty(nbytes(n, k), dtype=torch.uint8)
        ascending = fast.encode(index.numpy(), n, low_bits(n, k), out.numpy())
    # Callers then use the indices in compiled kernels, which do not check bounds.
    if not ascending:
        raise ValueError(
            f"Elias-Fano can encode only indices that ascend strictly within [0, {n}); check the "
            "selector that chose them"
        )
    return encode_all(index, [Segment(0, n, k)])[0] if fast is None else out


def encode_all(index: Tensor, segments: Sequence[Segment]) -> list[Tensor]:
    """Encode the indices of all segments at once.

    Args:
        index: 1-D int64, within the whole vector, segment by segment. Ascending in each of them.
        segments: the parts of the vector.

    Returns:
        The codes of the segments.
    """
    coded = [segment for segment in segments if 0 < segment.k < segment.n]
    if not coded:
        return [index.new_empty(0, dtype=torch.uint8) for _ in segments]
    if len(coded) < len(segments):
        parts = zip(split(index, [segment.k for segment in segments]), segments, strict=True)
        index = torch.cat([part for part, segment in parts if 0 < segment.k < segment.n])
    form = backend.device_form("elias_fano", index)
    if form is None:
        codes = elias_fano_torch.encode(index, _shape(coded))
    else:
        sizes = [nbytes(segment.n, segment.k) for segment in coded]
        codes = torch.zeros(sum(sizes), dtype=torch.uint8, device=index.device)
        form.encode(index, coded, starts(sizes), codes)
    return list(split(codes, [nbytes(segment.n, segment.k) for segment in segments]))


def decode(raw: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Decode the indices of a code, and test whether the code is intact.

    Args:
        raw: 1-D uint8, contiguous, ``nbytes(n, k)`` elements of any value.
        n: number of entries that the indices were chosen from.
        k: number of indices.

    Returns:
        The indices, 1-D int64, k elements, ascending strictly within [0, n); and a scalar bool
        tensor, whether the code is intact: then :func:`encode` turns the indices back into `raw`.
        If not, the indices are placeholders within [0, n).
    """
    fast = backend.host_form("elias_fano", raw) if 0 < k < n else None
    if fast is None:
        index, damaged = decode_all([raw], [Segment(0, n, k)])
        return index, ~damaged
    index = torch.empty(k, dtype=torch.int64)
    whole = fast.decode(raw.numpy(), n, low_bits(n, k), index.numpy())
    return index if whole else torch.arange(k), torch.tensor(whole)


def decode_all(codes: Sequence[Tensor], segments: Sequence[Segment]) -> tuple[Tensor, Tensor]:
    """Decode the codes of all segments at once.

    Args:
        codes: the code of each segment, 1-D uint8 of any contents.
        segments: the parts of the vector, at least one.

    Returns:
        The indices within the whole vector, 1-D int64, segment by segment; and a scalar bool
        tensor, whether a code is damaged: then the indices are placeholders within their segments.
    """
    device = codes[0].device
    coded = [i for i, segment in enumerate(segments) if 0 < segment.k < segment.n]
    whole = [segments[i] for i in coded]
    if len(coded) == len(segments):
        return _decode(codes, segments)
    damaged = torch.zeros((), dtype=torch.bool, device=device)
    index = torch.empty(0, dtype=torch.int64, device=device)
    if coded:
        index, damaged = _decode([codes[i] for i in coded], whole)
    found = dict(zip(coded, split(index, [segment.k for segment in whole]), strict=True))
    every = [
        found[i] if i in found else torch.arange(at, at + k, device=device)
        for i, (at, _, k) in enumerate(segments)
    ]
    return torch.cat(every), damaged


def _decode(codes: Sequence[Tensor], segments: Sequence[Segment]) -> tuple[Tensor, Tensor]:
    form = backend.device_form("elias_fano", codes[0])
    if form is None:
        return elias_fano_torch.decode(codes, _shape(segments))
    index = torch.empty(
        sum(segment.k for segment in segments), dtype=torch.int64, device=codes[0].device
    )
    raw, offsets = within(codes)
    damaged: Tensor = form.decode(raw, segments, offsets, index)
    return index, damaged


def _shape(segments: Sequence[Segment]) -> elias_fano_torch.Shape:
    low = [low_bits(segment.n, segment.k) for segment in segments]
    high = [_high_bits(n, k, bits) for (_, n, k), bits in zip(segments, low, strict=True)]
    return elias_fano_torch.Shape(segments, low, high)
