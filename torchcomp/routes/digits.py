"""Digits: distributed selection of the k largest entries of vectors, digit by digit.

Each rank owns a part of every vector. Its candidates are the k largest of its part, on accelerators
all of it, as integers with the order of the magnitudes. In each round, the owners add up histograms
of the next digit of the candidates that begin with the digits decided so far. At the end, they
all-gather how many candidates are above and equal to the k-th largest. Ties go to the lowest rank,
and within a rank to the lowest index. The result is therefore the same as for one rank that has the
whole vector.

The number of rounds is fixed, so the host never waits for an accelerator. This is plain torch. With
Triton, :class:`torchcomp.kernels.selecting_triton.Search` runs. Both send the same messages.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchcomp import host
from torchcomp.exchange import Exchange
from torchcomp.kernels.segments import Segment, digit_bits
from torchcomp.kernels.sparse import kernels_for
from torchcomp.kernels.vectors import Parted
from torchcomp.traffic import Load, gathered


class DigitSearch:
    """The search for the entries of a bucket's downlink.

    The arguments are those of :class:`torchcomp.kernels.selecting_triton.Search`.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        at: Sequence[int],
        sizes: Sequence[int],
        searched: Sequence[bool],
        exchange: Exchange,
        device: torch.device,
    ) -> None:
        self._exchange, self._bits = exchange, digit_bits(len(segments))
        own = tuple(Segment(start, n, min(n, k)) for start, n, k in segments)
        self._room = sum(segment.k for segment in own)
        # Looking at all entries takes an accelerator less time than the launches of a selection.
        self._candidates = None
        if host.can_read(torch.empty(0, device=device)):
            self._candidates = kernels_for(Parted(own, device, torch.float32), None)
        self._counts = [segment.n if self._candidates is None else segment.k for segment in own]
        numbers = [at, [segment.k for segment in segments], list(map(int, searched))]
        self._at, self._k, self._searched = (
            host.copy_to(torch.tensor(each, dtype=torch.int64), device) for each in numbers
        )
        self._digits = torch.arange(1 << self._bits, device=device)
        self._none = torch.zeros(len(segments), dtype=torch.int32, device=device)

    def __call__(
        self, g: Tensor, e: Tensor, x: Tensor, before: Tensor, after: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write ``g + e`` to `x`, and select from the whole bucket, together with all owners.

        Args:
            g: this owner's shard of the mean.
            e: its server residual.
            x: receives the sum.
            before: the threshold of each vector in the last step, or 0. Triton starts from it.
            after: receives those of this step, or 0 if no others were needed to find it.

        Returns:
            The indices of this owner's entries in `x`, with others after them; and the number of
            entries in each piece of all shards.
        """
        if not self._counts:
            return self._at, self._at
        exchange, index, values = self._exchange, None, x
        if self._candidates is None:
            torch.add(g, e, out=x)
        else:
            index = self._candidates.add_and_select(g, e, x)
            values = x.index_select(0, index)
        keys = torch.split(order_bits(values), self._counts)
        # Those with Triton look at their candidates alone, if all owners together have enough. This
        # rank has none of that kind, and takes away those of the others.
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
        chosen = self._chosen(keys, prefix, taken[exchange.rank])
        chosen = chosen if index is None else index.index_select(0, chosen)
        return chosen, (above + taken).view(-1).index_select(0, self._at)

    def _count(self, keys: Sequence[Tensor], prefix: Tensor, shift: int) -> Tensor:
        """Return the number of this rank's candidates by vector and digit."""
        counts = self._digits.new_zeros(len(keys), len(self._digits), dtype=torch.int32)
        for own, key, known in zip(counts, keys, prefix, strict=True):
            # In two steps: a shift by all bits of a number is not defined.
            digits = key >> shift
            matches = (digits >> self._bits) == known
            own.index_add_(0, digits & (len(self._digits) - 1), matches.int())
        return counts

    def _chosen(self, keys: Sequence[Tensor], thresholds: Tensor, taken: Tensor) -> Tensor:
        """Return the ascending positions of this rank's entries, and others after them."""
        masks = []
        for key, threshold, count in zip(keys, thresholds, taken, strict=True):
            tied = key == threshold
            masks.append((key > threshold) | (tied & (tied.cumsum(0) <= count)))
        # Static shapes, because nonzero() would make the host wait.
        return torch.nonzero_static(torch.cat(masks), size=self._room, fill_value=0)[:, 0]


def order_bits(x: Tensor) -> Tensor:
    """Return non-negative integers with the order of |x|, where a NaN equals infinity.

    The dtype is int64 for float64 and int32 for all others.
    """
    # The bits of non-negative IEEE floats, read as integers, have the same order as the floats.
    wide = x.abs().to(torch.promote_types(x.dtype, torch.float32))
    wide.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    return wide.view(torch.int64 if wide.dtype == torch.float64 else torch.int32)


def search_load(vectors: int, dtype: torch.dtype, world_size: int, node: int = 1) -> Load:
    """Return the bytes of a search over the card of a node.

    Args:
        vectors: number of vectors.
        dtype: dtype of the values.
        world_size: number of ranks.
        node: number of ranks of the node.
    """
    bits = digit_bits(vectors)
    rounds = 8 * max(4, dtype.itemsize) // bits
    moved = gathered(8 * vectors, world_size, node)
    return Load(summed=4 * vectors * (1 + (rounds << bits)), sent=moved, received=moved)
