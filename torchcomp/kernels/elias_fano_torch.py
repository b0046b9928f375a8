"""Elias-Fano coding in plain torch: the form for accelerators, and the reference of the others.

The format is in :mod:`.elias_fano`. Shapes are static, so that the host never waits. All segments
are coded at once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchcomp.engine import host
from torchcomp.kernels.segments import Segment, add, line, shape_of, spread, starts


class Shape:
    """The static numbers of the codes of several segments.

    Args:
        segments: with 0 < k < n. Segments of which nothing or all is sent have no code.
        low: width of the low parts of each segment, in bits.
        high: length of the high part of each segment, in bits.
    """

    def __init__(
        self, segments: Sequence[Segment], low: Sequence[int], high: Sequence[int]
    ) -> None:
        self.start, self.n, self.k = (list(column) for column in zip(*segments, strict=True))
        self.low = list(low)
        self.low_bytes = [(k * bits + 7) // 8 for k, bits in zip(self.k, low, strict=True)]
        self.high_bytes = [(bits + 7) // 8 for bits in high]
        # With a low part, the high part moves on by one bit from entry to entry. A bitmap does not.
        self.step = [int(bits > 0) for bits in low]

    @property
    def nbytes(self) -> list[int]:
        """Length of each segment's code in bytes."""
        return [low + high for low, high in zip(self.low_bytes, self.high_bytes, strict=True)]

    def lines(
        self,
        device: torch.device,
        low_at: Sequence[int],
        high_at: Sequence[int],
        *columns: Sequence[int],
    ) -> list[Tensor | int]:
        """Return, for each entry, where its bits are.

        Args:
            device: device of the result.
            low_at: byte at which the low part of each segment begins.
            high_at: byte at which the high part of each segment begins.
            columns: further numbers of segments.

        Returns:
            The position of the entry's first low bit; the position of its high bit, if the high
            part of the index were 0; the width of its low part; and the columns, for each entry.
        """
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


def encode(index: Tensor, shape: Shape) -> Tensor:
    """Encode indices.

    Args:
        index: 1-D int64, within the whole vector: the indices of the first segment, of the second,
            and so on. Ascending within each segment.
        shape: the numbers of the segments.

    Returns:
        The codes of the segments, one after another, 1-D uint8.
    """
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
    packed = (bits.view(-1, 8) << _bit_positions(bits)).sum(1, dtype=torch.uint8)
    return packed[:-1]


def decode(codes: Sequence[Tensor], shape: Shape) -> tuple[Tensor, Tensor]:
    """Decode the codes of all segments, and test whether one is damaged.

    Args:
        codes: for each segment, its code of any contents, 1-D uint8.
        shape: the numbers of the segments.

    Returns:
        The indices within the whole vector, 1-D int64, segment by segment, in their segments
        whatever the codes contain; and a scalar bool tensor, whether a code is damaged.
    """
    device, low_bytes = codes[0].device, sum(shape.low_bytes)
    parts = list(zip(codes, shape.low_bytes, strict=True))
    lows, highs = [code[:cut] for code, cut in parts], [code[cut:] for code, cut in parts]
    # The bytes after the low parts are read, but not used: any will do.
    raw = torch.cat([*lows, *highs, *[codes[0]] * 8])
    begin, high_begin = starts(shape.low_bytes), starts(shape.high_bytes)
    low_line, high_line, low, n, start, base = shape.lines(
        device, begin, high_begin, shape.n, shape.start, _apart(shape)
    )
    bits = raw[low_bytes : low_bytes + sum(shape.high_bytes), None] & _single_bits(device)
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


def _apart(shape: Shape) -> list[int]:
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


def _padding(raw: Tensor, shape: Shape) -> list[Tensor]:
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


def _single_bits(device: torch.device) -> Tensor:
    return host.copy_to(torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8), device)


def _bit_positions(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
