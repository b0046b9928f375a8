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

from torchcomp.engine import host
from torchcomp.kernels.segments import Segment, add, line, shape_of, split, spread, starts


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
    if not ascending:
        raise ValueError(
            f"Elias-Fano can encode only indices that ascend strictly within [0, {n}); check the "
            "selector that chose them"
        )


def encode(index: Tensor, segments: Sequence[Segment]) -> list[Tensor]:
    """Encode the indices of all segments at once. They are not checked."""
    coded = [segment for segment in segments if 0 < segment.k < segment.n]
    if not coded:
        return [index.new_empty(0, dtype=torch.uint8) for _ in segments]
    if len(coded) < len(segments):
        parts = zip(split(index, [segment.k for segment in segments]), segments, strict=True)
        index = torch.cat([part for part, segment in parts if 0 < segment.k < segment.n])
    codes = _encode(index, _Shape(coded))
    return list(split(codes, [nbytes(segment.n, segment.k) for segment in segments]))


def decode(codes: Sequence[Tensor], segments: Sequence[Segment]) -> tuple[Tensor, Tensor]:
    """Decode the codes of all segments at once, and test whether they are intact."""
    device = codes[0].device
    some = [segment for segment in segments if 0 < segment.k < segment.n]
    if len(some) == len(segments):
        return _decode(codes, _Shape(segments))
    damaged = torch.zeros((), dtype=torch.bool, device=device)
    index = torch.empty(0, dtype=torch.int64, device=device)
    if some:
        index, damaged = _decode([code for code in codes if code.numel()], _Shape(some))
    found = iter(split(index, [segment.k for segment in some]))
    every = [
        next(found) if 0 < k < n else torch.arange(at, at + k, device=device)
        for at, n, k in segments
    ]
    return torch.cat(every), damaged


class _Shape:
    """The static numbers of the codes of several segments, all with 0 < k < n."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.start, self.n, self.k = (list(column) for column in zip(*segments, strict=True))
        self.low = [low_bits(n, k) for _, n, k in segments]
        self.low_bytes = [(k * low + 7) // 8 for k, low in zip(self.k, self.low, strict=True)]
        self.nbytes = [nbytes(n, k) for _, n, k in segments]
        pairs = zip(self.nbytes, self.low_bytes, strict=True)
        self.high_bytes = [size - low for size, low in pairs]
        # With a low part, the high part moves on by one bit from entry to entry. A bitmap does not.
        self.step = [int(low > 0) for low in self.low]

    def lines(
        self,
        device: torch.device,
        low_at: Sequence[int],
        high_at: Sequence[int],
        *columns: Sequence[int],
    ) -> list[Tensor | int]:
        """Return, for each entry, where its bits are."""
        # From the number of an entry within its segment to its number among all entries.
        each = list(zip(starts(self.k), self.low, self.step, low_at, high_at, strict=True))
        low_line = [8 * at - first * low for first, low, _, at, _ in each]
        high_line = [8 * at - first * step for first, _, step, _, at in each]
        low, step, low_offset, high_offset, *others = spread(
            self.k, device, self.low, self.step, low_line, high_line, *columns
        )
        return [
            line(self.k, device, low, low_offset),
            line(self.k, device, step, high_offset),
            low,
            *others,
        ]


def _encode(index: Tensor, shape: _Shape) -> Tensor:
    """Return the codes of segments, one after another; see :func:`encode`."""
    begin = starts(shape.nbytes)
    high_begin = [at + size for at, size in zip(begin, shape.low_bytes, strict=True)]
    away = [-start for start in shape.start]
    low_line, high_line, low, offset = shape.lines(index.device, begin, high_begin, away)
    local = add(index.view(shape_of(shape.k)), offset)
    # One uint8 per bit until they are packed at the end: torch has no scatter of single bits. The
    # last byte takes the bits that do not exist.
    bits = torch.zeros(8 * sum(shape.nbytes) + 8, dtype=torch.uint8, device=index.device)
    bits.index_fill_(0, ((local >> low) + high_line).view(-1), 1)
    if max(shape.low) and isinstance(low_line, Tensor):
        each = torch.arange(max(shape.low), device=index.device)
        at = low_line[..., None] + each
        if isinstance(low, Tensor):
            at = at.where(each < low[..., None], bits.numel() - 1)
        values = torch.empty(at.shape, dtype=torch.uint8, device=index.device)
        torch.bitwise_and(local[..., None] >> each, 1, out=values)
        bits.index_copy_(0, at.view(-1), values.view(-1))
    packed = (bits.view(-1, 8) << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(
        1, dtype=torch.uint8
    )
    return packed[:-1]


def _decode(codes: Sequence[Tensor], shape: _Shape) -> tuple[Tensor, Tensor]:
    """Decode the codes of segments; see :func:`decode`."""
    device, low_bytes = codes[0].device, sum(shape.low_bytes)
    parts = list(zip(codes, shape.low_bytes, strict=True))
    lows, highs = [code[:cut] for code, cut in parts], [code[cut:] for code, cut in parts]
    # The bytes after the low parts are read, but not used: any will do.
    raw = torch.cat([*lows, *highs, *[codes[0]] * 8])
    begin, high_begin = starts(shape.low_bytes), starts(shape.high_bytes)
    low_line, high_line, low, n, start, base = shape.lines(
        device, begin, high_begin, shape.n, shape.start, _apart(shape)
    )
    single = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8)
    bits = raw[low_bytes : low_bytes + sum(shape.high_bytes), None] & host.copy_to(single, device)
    # nonzero() would make the host wait for the number of set bits. A damaged code can have another
    # number of them, so look for one more.
    total = sum(shape.k)
    at = torch.nonzero_static(bits.view(-1), size=total + 1, fill_value=-1)[:, 0]
    local = at[:total].view(shape_of(shape.k)) - high_line
    if max(shape.low) and isinstance(low_line, Tensor):
        local = (local << low) | _low_parts(raw, low_line, low, max(shape.low))
    # If every index is in its segment and there are as many bits as entries, then each segment has
    # its own bits, because a segment's bits cannot stand for an index in another one.
    inside = local.clamp(0, n - 1) if isinstance(n, int) else local.clamp(min=0).minimum(n - 1)
    index = add(inside, start).view(-1)
    apart = add(index.view(inside.shape), base).view(-1)
    wrong = [(local != inside).view(-1), apart[1:] <= apart[:-1], at[total:] >= 0]
    return index, torch.cat([*wrong, *_padding(raw, shape)]).any()


def _apart(shape: _Shape) -> list[int]:
    """Return offsets that make the indices of all segments ascend, if those of each segment do."""
    ends = [start + n for start, n in zip(shape.start, shape.n, strict=True)]
    if all(end <= start for end, start in zip(ends, shape.start[1:], strict=False)):
        return [0] * len(ends)
    return starts([max(ends)] * len(ends))


def _low_parts(raw: Tensor, bit: Tensor, low: Tensor | int, widest: int) -> Tensor:
    """Return the numbers of `low` bits at the positions `bit` of a bit vector."""
    # A low part that starts at any bit of a byte lies within 32 or 64 bits.
    dtype = torch.int32 if widest + 7 <= 32 else torch.int64
    window = torch.arange(dtype.itemsize, device=raw.device)
    words = raw[(bit >> 3)[..., None] + window].view(dtype)[..., 0]
    mask = (1 << low) - 1
    return (words >> (bit & 7)) & mask


def _padding(raw: Tensor, shape: _Shape) -> list[Tensor]:
    """Return whether there are set bits after the low parts, up to a whole byte."""
    used = [k * low % 8 for k, low in zip(shape.k, shape.low, strict=True)]
    ends = [at + size for at, size in zip(starts(shape.low_bytes), shape.low_bytes, strict=True)]
    if not any(used):
        return []
    size = shape.low_bytes[0]
    if len(set(used)) == 1 and len(set(shape.low_bytes)) == 1:
        return [raw[size - 1 : ends[-1] : size] >> used[0] != 0]
    padded = [(end - 1, bits) for end, bits in zip(ends, used, strict=True) if bits]
    last, shift = host.copy_to(torch.tensor(padded).T.contiguous(), raw.device)
    return [raw.index_select(0, last) >> shift != 0]
