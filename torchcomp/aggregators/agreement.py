"""Agreement: which entries are the k largest of a vector whose parts lie on several ranks.

Every rank brings the candidates of its part, as integers that order like magnitudes. Either all
see all of them, which takes one small message, or, where that would be much, they find the k-th
largest digit by digit from sums of histograms. Ties go to the lowest rank, and within a rank to
the lowest index, so that what is chosen is what one rank with the whole vector would choose.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchcomp.exchange import Exchange, Load, gather_bytes, sum_bytes

_DIGIT = 11
_HISTOGRAM = 4 * 2**_DIGIT


@dataclass(frozen=True)
class Agreed:
    """The outcome for one vector.

    Attributes:
        threshold: the k-th largest of all candidates.
        counts: entries chosen from each rank's part.
    """

    threshold: int
    counts: tuple[int, ...]


def order_bits(x: Tensor) -> Tensor:
    """Non-negative integers that order like |x|, NaN like infinity (int32, or int64 of float64)."""
    wide = x.abs().to(torch.promote_types(x.dtype, torch.float32))
    wide.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    return wide.view(torch.int64 if wide.dtype == torch.float64 else torch.int32)


def agree(exchange: Exchange, candidates: Tensor, sizes: tuple[int, ...], k: int) -> Agreed:
    """Find the `k` largest of all ranks' candidates; all ranks call it alike.

    Args:
        exchange: the ranks.
        candidates: this rank's, from :func:`order_bits`.
        sizes: number of candidates of each rank.
        k: at most ``sum(sizes)``.
    """
    if _gathers(sizes, candidates.element_size()):
        everyone = exchange.gather_varied(candidates, sizes)
        threshold = int(torch.sort(everyone, descending=True).values[k - 1])
        parts = torch.split(everyone, list(sizes))
        above = [int((part > threshold).sum()) for part in parts]
        tied = [int((part == threshold).sum()) for part in parts]
    else:
        threshold = _threshold(exchange, candidates.long(), 8 * candidates.element_size() - 1, k)
        mine = torch.stack([(candidates > threshold).sum(), (candidates == threshold).sum()])
        rows = exchange.gather_varied(mine, [2] * exchange.world_size)
        above, tied = rows.view(-1, 2).t().tolist()
    return Agreed(threshold, _share(above, tied, k))


def chosen(candidates: Tensor, threshold: int, count: int) -> Tensor:
    """Ascending positions of the `count` candidates of this rank that were chosen."""
    above = torch.nonzero(candidates > threshold).squeeze(1)
    tied = torch.nonzero(candidates == threshold).squeeze(1)[: count - above.numel()]
    return torch.cat([above, tied]).sort().values


def agreement_load(sizes: tuple[int, ...], itemsize: int, rank: int) -> Load:
    """What :func:`agree` moves over a rank's link."""
    world_size = len(sizes)
    if _gathers(sizes, itemsize):
        others = sum(sizes) - sizes[rank]
        return Load(sent=itemsize * sizes[rank] * (world_size - 1), received=itemsize * others)
    pairs = gather_bytes(16, world_size)
    return Load(_rounds(8 * itemsize - 1) * _HISTOGRAM, pairs, pairs)


def _gathers(sizes: tuple[int, ...], itemsize: int) -> bool:
    by_sums = sum_bytes(_rounds(8 * itemsize - 1) * _HISTOGRAM, len(sizes))
    return len(sizes) == 1 or itemsize * sum(sizes) <= by_sums


def _rounds(bits: int) -> int:
    return -(-bits // _DIGIT)


def _threshold(exchange: Exchange, alive: Tensor, bits: int, k: int) -> int:
    threshold = 0
    for step in reversed(range(_rounds(bits))):
        digits = (alive >> (step * _DIGIT)) & (2**_DIGIT - 1)
        histogram = exchange.sum_counts(torch.bincount(digits, minlength=2**_DIGIT).int())
        at_least = histogram.flip(0).cumsum(0).flip(0)
        digit = int((at_least >= k).sum()) - 1
        k -= int(at_least[digit] - histogram[digit])
        alive = alive[digits == digit]
        threshold = threshold << _DIGIT | digit
    return threshold


def _share(above: list[int], tied: list[int], k: int) -> tuple[int, ...]:
    room = k - sum(above)
    counts = []
    for strictly, equal in zip(above, tied, strict=True):
        taken = min(equal, room)
        room -= taken
        counts.append(strictly + taken)
    return tuple(counts)
