"""Digits: the search for the k largest entries of all owners, decided on an accelerator.

The host never waits, because the number of rounds is fixed. In each, the owners add up histograms
of the next digit of those magnitudes' bits whose first digits are decided. At the end, they
all-gather how many are above and equal to the threshold. Ties go to the lowest rank and index. With
Triton, :class:`torchcomp.kernels.selecting_triton.Search` runs, and sends the same messages.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchcomp.engine import host
from torchcomp.exchange import Exchange
from torchcomp.kernels.segments import Segment, digit_bits
from torchcomp.routes.threshold import order_bits


class DigitSearch:
    """The search for the entries of a bucket's downlink."""

    def __init__(
        self,
        segments: Sequence[Segment],
        at: Sequence[int],
        sizes: Sequence[int],
        searched: Sequence[bool],
        exchange: Exchange,
        device: torch.device,
    ) -> None:
        self._segments, self._exchange = segments, exchange
        self._bits = digit_bits(len(segments))
        numbers = [at, [segment.k for segment in segments], list(map(int, searched))]
        self._at, self._k, self._searched = (
            host.copy_to(torch.tensor(each, dtype=torch.int64), device) for each in numbers
        )
        self._digits = torch.arange(1 << self._bits, device=device)
        self._none = torch.zeros(len(segments), dtype=torch.int32, device=device)
        self._room = sum(min(segment.n, segment.k) for segment in segments)

    def __call__(
        self, g: Tensor, e: Tensor, x: Tensor, before: Tensor, after: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Do as :class:`.threshold.HostSearch` does. There can be more indices than entries."""
        torch.add(g, e, out=x)
        exchange = self._exchange
        if not self._segments:
            return self._at, self._at
        keys = [order_bits(x[segment.span]) for segment in self._segments]
        # Those with Triton look at few candidates, if all owners together have enough. So that they
        # look at all magnitudes, this rank has none, and takes away those of the others.
        exchange.all_reduce(self._none.fill_(-(2**30)))
        left, prefix = self._k, torch.zeros_like(self._k)
        for shift in range(8 * keys[0].itemsize - self._bits, -1, -self._bits):
            counts = self._count(keys, prefix, shift)
            exchange.all_reduce(counts.view(-1))
            larger = counts.sum(1, keepdim=True) - counts.cumsum(1)
            # Not of the lowest: it is chosen if no other is, also if counts were damaged.
            digit = (larger + counts >= left[:, None])[:, 1:].sum(1)
            left = left - larger.gather(1, digit[:, None])[:, 0]
            prefix = (prefix << self._bits) + digit
        torch.mul(prefix, self._searched, out=after)
        pairs = zip(keys, prefix, strict=True)
        own = torch.stack([torch.stack([(k > t).sum(), (k == t).sum()]) for k, t in pairs])
        above, tied = exchange.all_gather_rows(own.int().view(-1)).view(-1, len(keys), 2).unbind(2)
        taken = torch.minimum((left - (tied.cumsum(0) - tied)).clamp(min=0), tied)
        index = self._chosen(keys, prefix, taken[exchange.rank])
        return index, (above + taken).view(-1).index_select(0, self._at)

    def _count(self, keys: Sequence[Tensor], prefix: Tensor, shift: int) -> Tensor:
        """Return the number of this rank's magnitudes by vector and digit."""
        counts = self._digits.new_zeros(len(keys), len(self._digits), dtype=torch.int32)
        for own, key, known in zip(counts, keys, prefix, strict=True):
            # In two steps: a shift by all bits of a number is not defined.
            digits = key >> shift
            matches = (digits >> self._bits) == known
            own.index_add_(0, digits & (len(self._digits) - 1), matches.int())
        return counts

    def _chosen(self, keys: Sequence[Tensor], thresholds: Tensor, taken: Tensor) -> Tensor:
        """Return the ascending indices of this rank's entries, and others after them."""
        masks = []
        for key, threshold, count in zip(keys, thresholds, taken, strict=True):
            tied = key == threshold
            masks.append((key > threshold) | (tied & (tied.cumsum(0) <= count)))
        # Static shapes, because nonzero() would make the host wait.
        return torch.nonzero_static(torch.cat(masks), size=self._room, fill_value=0)[:, 0]
