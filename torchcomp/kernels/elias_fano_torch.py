"""Elias-Fano coding in plain torch: the form for accelerators, and the reference of the others.

The format is in :mod:`.elias_fano`. Shapes are static, so that the host never waits. All segments
are coded at once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchcomp import host
from torchcomp.kernels.segments import Segment, spread, starts


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
        self.low, self.high = list(low), list(high)
        self.low_bytes = [(k * bits + 7) // 8 for k, bits in zip(self.k, low, strict=True)]
        self.high_bytes = [(bits + 7) // 8 for bits in high]
        # With a low part, the high part has a set bit for each entry, and moves on by one bit from
        # entry to entry. A bitmap does not.
        self.step = [int(bits > 0) for bits in low]

    @property
    def nbytes(self) -> list[int]:
        """Length of each segment's code in bytes."""
        return [low + high for low, high in zip(self.low_bytes, self.high_bytes, strict=True)]


def encode(index: Tensor, shape: Shape) -> Tensor:
    """Encode indices.

    Args:
        index: 1-D int64, within the whole vector: the indices of the first segment, of the second,
            and so on. Ascending within each segment.
        shape: the numbers of the segments.

    Returns:
        The codes of the segments, one after another, 1-D uint8.
    """
    begin = [8 * each for each in starts(shape.nbytes)]
    high_begin = [at + 8 * size for at, size in zip(begin, shape.low_bytes, strict=True)]
    first, start, low, step, low_at, high_at = spread(
        shape.k,
        index.device,
        *(starts(shape.k), shape.start, shape.low, shape.step, begin, high_begin),
    )
    position, local = torch.arange(index.numel(), device=index.device) - first, index - start
    # One uint8 per bit until they are packed at the end: torch has no scatter of single bits. The
    # last byte takes the bits that do not exist.
    bits = torch.zeros(8 * sum(shape.nbytes) + 8, dtype=torch.uint8, device=index.device)
    bits.index_fill_(0, (local >> low) + position * step + high_at, 1)
    widest = max(shape.low)
    if widest:
        each = torch.arange(widest, device=index.device)
        at = (position * low + low_at)[:, None] + each
        if isinstance(low, Tensor):
            at = at.where(each < low[:, None], bits.numel() - 1)
        values = ((local[:, None] >> each) & 1).to(torch.uint8)
        bits.index_copy_(0, at.view(-1), values.view(-1))
    packed = (bits.view(-1, 8) << _bit_positions(bits)).sum(1, dtype=torch.uint8)
    return packed[:-1]


def decode(codes: Sequence[Tensor], shape: Shape) -> tuple[Tensor, Tensor]:
    """Decode the codes of all segments, and test whether they are intact.

    Args:
        codes: for each segment, its code of any contents, 1-D uint8.
        shape: the numbers of the segments.

    Returns:
        The indices within the whole vector, 1-D int64, segment by segment; and a scalar bool
        tensor, whether all codes are intact. If it is false, the indices of a segment are its
        first k elements.
    """
    pairs = list(zip(codes, shape.low_bytes, strict=True))
    high = _unpack(torch.cat([code[cut:] for code, cut in pairs]))
    begin = [8 * each for each in starts(shape.high_bytes)]
    end = [at + size for at, size in zip(begin, shape.high, strict=True)]
    first, start, n, low, step, high_at, high_end, low_at = spread(
        shape.k,
        high.device,
        *(starts(shape.k), shape.start, shape.n, shape.low, shape.step),
        *(begin, end, starts(shape.low_bytes)),
    )
    total = sum(shape.k)
    position = torch.arange(total, device=high.device) - first
    # nonzero() would make the host wait for the number of set bits. A damaged code can have another
    # number of them.
    at = torch.nonzero_static(high, size=total, fill_value=0)[:, 0]
    # Each segment has k set bits, if all of them together are as many as all entries, and each
    # entry's bit is in its own segment. A bit in the padding is not.
    intact = (high.sum() == total) & ((at >= high_at) & (at < high_end)).all()
    local = (at - high_at - position * step) << low
    if max(shape.low):
        lows = torch.cat([code[:cut] for code, cut in pairs])
        local |= _low_parts(lows, position * low + 8 * low_at, low, max(shape.low))
        intact &= _padding_is_zero(lows, shape)
    ascends = (local[1:] > local[:-1]) | (position[1:] == 0)
    intact = intact & ascends.all() & (local < n).all()
    return local.where(intact, position) + start, intact


def _low_parts(raw: Tensor, bit: Tensor, low: int | Tensor, widest: int) -> Tensor:
    """Return the numbers of `low` bits at the positions `bit` of a bit vector."""
    # A low part that starts at any bit of a byte extends over at most this many bytes.
    count = (widest + 14) // 8
    each = torch.arange(count, device=raw.device)
    padded = torch.nn.functional.pad(raw, (0, count))
    window = padded[(bit >> 3)[:, None] + each].long() << (8 * each)
    mask = (torch.ones_like(bit) << low) - 1 if isinstance(low, Tensor) else (1 << low) - 1
    found: Tensor = (window.sum(1) >> (bit & 7)) & mask
    return found


def _padding_is_zero(lows: Tensor, shape: Shape) -> Tensor:
    """Return whether the bits after each segment's low part, up to a whole byte, are zero."""
    ends = zip(starts(shape.low_bytes), shape.low_bytes, shape.k, shape.low, strict=True)
    # A number of bits that fills the last byte would leave no padding to look at.
    padded = [(at + size - 1, k * low % 8) for at, size, k, low in ends if k * low % 8]
    if not padded:
        return torch.full((), True, device=lows.device)
    last, used = host.copy_to(torch.tensor(padded).T.contiguous(), lows.device)
    clear: Tensor = (lows[last] >> used == 0).all()
    return clear


def _unpack(raw: Tensor) -> Tensor:
    """Unpack bytes into bits, 0 or 1 as uint8."""
    return ((raw[:, None] >> _bit_positions(raw)) & 1).view(-1)


def _bit_positions(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
