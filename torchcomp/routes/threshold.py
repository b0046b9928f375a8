"""Threshold: distributed selection of the k largest entries of a vector, by histograms.

Each rank has a part of the vector. It contributes the candidates of its part, as integers with the
order of the magnitudes.

1. The ranks all-gather histograms of an interval that contains the k-th largest candidate.
2. They narrow the interval to the bin of the k-th largest, and repeat from 1.
3. When few candidates are left in the interval, the ranks all-gather those and sort them.

The first histogram covers a window around the previous step's threshold, if there is one. Ties go
to the lowest rank, and within a rank to the lowest index. The result is therefore the same as for
one rank that has the whole vector.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchcomp.compressors.base import Vector, Vectors
from torchcomp.exchange import Exchange
from torchcomp.exchange.traffic import Load, gathered
from torchcomp.kernels.segments import joined
from torchcomp.routes.shards import Direction

_WINDOW_BITS = {torch.int32: 24, torch.int64: 53}
"""log2 of the width of a window of two octaves, by dtype of the candidates.

One octave, a factor of 2, is 2^23 steps in the bits of a float32 and 2^52 in those of a float64.
"""


@dataclass(frozen=True)
class Query:
    """The search for the k largest entries of one vector, as this rank sees it."""

    candidates: Tensor  # candidates of this rank, from order_bits
    sizes: Sequence[int]  # number of candidates of each rank
    k: int  # number of entries to select
    # Where the search starts, or 0 for no guess. Equal on all ranks. It affects only the number of
    # rounds.
    guess: int = 0


@dataclass(frozen=True)
class Selection:
    """The k largest entries of one vector."""

    threshold: int  # the k-th largest of all candidates; 0 if all are selected
    counts: Sequence[int]  # number of selected entries of each rank


def order_bits(x: Tensor) -> Tensor:
    """Return non-negative integers with the order of |x|, where a NaN equals infinity.

    The dtype is int64 for float64 and int32 for all others.
    """
    # The bits of non-negative IEEE floats, read as integers, have the same order as the floats.
    wide = x.abs().to(torch.promote_types(x.dtype, torch.float32))
    wide.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    return wide.view(torch.int64 if wide.dtype == torch.float64 else torch.int32)


def chosen(candidates: Tensor, threshold: int, count: int) -> Tensor:
    """Return the ascending positions of this rank's `count` selected candidates."""
    above, tied = candidates > threshold, candidates == threshold
    # Static shapes, because nonzero() would make the host wait for an accelerator.
    selected = above | (tied & (tied.cumsum(0) <= count - above.sum()))
    # Counts that were damaged on the way must not lead outside.
    return torch.nonzero_static(selected, size=count)[:, 0].clamp_(min=0)


class _Search:
    """The interval [low, high) that contains the k-th largest candidate of one query.

    Attributes:
        above: by rank, the number of candidates above the interval.
        inside: by rank, the number of candidates in the interval.
    """

    def __init__(self, query: Query) -> None:
        self.candidates, self.k = query.candidates, query.k
        self.inside = list(query.sizes)
        self.above = [0] * len(self.inside)
        # `high` is above every candidate, because the bits of infinity are less than the maximum.
        # It must fit their dtype: torch wraps a larger number in a comparison with a tensor.
        self.low, self.high = 0, torch.iinfo(self.candidates.dtype).max
        self.bins = _bins(query.k, len(self.inside))
        # A power of two as the width of a bin, so that `histogram` can shift instead of divide.
        self._shift = _WINDOW_BITS[self.candidates.dtype] - self.bins.bit_length() + 1
        # A guess can come from a checkpoint, and be any number.
        guess = min(query.guess, self.high - 1)
        self._start = max(0, guess - (self.bins // 2 << self._shift))
        if not query.guess:
            self._fill_interval()

    @property
    def done(self) -> bool:
        """Whether the remaining candidates take no more bytes than another histogram."""
        left = self.candidates.element_size() * sum(self.inside)
        return self.high - self.low == 1 or left <= 4 * self.bins * len(self.inside)

    def histogram(self) -> Tensor:
        """Return the number of this rank's candidates per bin.

        The first and the last bin include the candidates below and above the window. A bad guess
        therefore costs rounds, but never changes the result.
        """
        binned = ((self.candidates - self._start) >> self._shift).clamp_(0, self.bins - 1)
        counts = torch.zeros(self.bins, dtype=torch.int32, device=binned.device)
        # Not bincount(), which makes the host wait for an accelerator.
        return counts.index_add_(0, binned, torch.ones_like(binned, dtype=torch.int32))

    def narrow(self, histograms: Tensor, rank: int) -> None:
        """Narrow the interval to the bin of the k-th largest.

        Args:
            histograms: (world_size, bins), the histograms of all ranks, on the CPU.
            rank: this rank.
        """
        # Per bin, the candidates in it and in all higher bins. The k-th largest is in the highest
        # bin where this number reaches k.
        at_least = histograms.sum(0).flip(0).cumsum(0).flip(0)
        found = int((at_least >= self.k - sum(self.above)).sum()) - 1
        higher = histograms[:, found + 1 :].sum(1).tolist()
        self.above = [n + more for n, more in zip(self.above, higher, strict=True)]
        self.inside = histograms[:, found].tolist()
        # The first and the last bin are open at the outer end: keep the old bound there.
        if found < self.bins - 1:
            self.high = min(self.high, self._start + (found + 1 << self._shift))
        if found > 0:
            self.low = max(self.low, self._start + (found << self._shift))
        inside = (self.candidates >= self.low) & (self.candidates < self.high)
        left = torch.nonzero_static(inside, size=self.inside[rank])[:, 0]
        # Counts that were damaged on the way must not lead outside.
        self.candidates = self.candidates.index_select(0, left.clamp_(min=0))
        self._fill_interval()

    def select(self, remaining: Sequence[Tensor]) -> Selection:
        """Return the selection, from every rank's candidates in the interval, on the CPU."""
        if self.high - self.low == 1:  # all of them are equal, and were not exchanged
            return Selection(self.low, _counts(self.above, self.inside, self.k))
        descending = torch.sort(torch.cat(list(remaining)), descending=True).values
        threshold = int(descending[self.k - sum(self.above) - 1])
        higher = [int((part > threshold).sum()) for part in remaining]
        above = [n + more for n, more in zip(self.above, higher, strict=True)]
        tied = [int((part == threshold).sum()) for part in remaining]
        return Selection(threshold, _counts(above, tied, self.k))

    def _fill_interval(self) -> None:
        """Choose the narrowest bins that cover the interval."""
        width = self.high - self.low
        self._start, self._shift = self.low, max(0, (-(-width // self.bins) - 1).bit_length())


def find_largest(exchange: Exchange, queries: Sequence[Query]) -> list[Selection]:
    """Select the k largest of all ranks' candidates, for each query.

    All ranks call this function, with queries for the same vectors in the same order.
    """
    searches = {i: _Search(query) for i, query in enumerate(queries) if query.k < sum(query.sizes)}
    # Steps 1 and 2. All queries share a collective per round, to save latency.
    while wide := [search for search in searches.values() if not search.done]:
        mine = torch.cat([search.histogram() for search in wide])
        # The host waits once per round, for the histograms of all queries.
        rows = exchange.all_gather_rows(mine).cpu()
        for search, columns in zip(wide, torch.split(rows, [s.bins for s in wide], 1), strict=True):
            search.narrow(columns, exchange.rank)
    # Step 3. An interval of one value needs no exchange: its counts are already known.
    open_searches = {i: search for i, search in searches.items() if search.high - search.low > 1}
    remaining: dict[int, list[Tensor]] = {i: [] for i in searches}
    if open_searches:
        mine = torch.cat([search.candidates for search in open_searches.values()])
        counts = list(zip(*(search.inside for search in open_searches.values()), strict=True))
        totals = [sum(row) for row in counts]
        parts = torch.split(exchange.all_gather_v(mine, totals).cpu(), totals)
        rows_of = [torch.split(part, list(row)) for part, row in zip(parts, counts, strict=True)]
        remaining |= {i: [row[j] for row in rows_of] for j, i in enumerate(open_searches)}
    return [
        searches[i].select(remaining[i]) if i in searches else Selection(0, query.sizes)
        for i, query in enumerate(queries)
    ]


class HostSearch:
    """The search for the entries of a bucket's downlink, decided on the host.

    Args:
        down: the downlink.
        exchange: the owners.
    """

    def __init__(self, down: Direction, exchange: Exchange) -> None:
        self._down, self._exchange, candidates = down, exchange, []
        for piece in down.pieces[exchange.rank]:
            exactly = down.selector.exactly(down.candidates[piece.vector][exchange.rank])
            layout = exactly.layout(piece.stop - piece.start, down.shape.dtype)
            candidates.append(Vector(piece.name, piece.span, exactly, layout))
        self._candidates = Vectors(candidates, torch.device("cpu"), down.shape.dtype)

    def __call__(
        self, g: Tensor, e: Tensor, x: Tensor, before: Tensor, after: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write ``g + e`` to `x`, and select from the whole bucket, together with all owners.

        Args:
            g: this owner's shard of the mean.
            e: its server residual.
            x: receives the sum.
            before: the threshold of each vector in the last step, or 0.
            after: receives those of this step, or 0 if no others were needed to find it.

        Returns:
            The indices of this owner's entries in `x`, and the number of entries in each piece of
            all shards.
        """
        down, rank = self._down, self._exchange.rank
        index = torch.empty(0, dtype=torch.int64)  # a shard can be empty
        if self._candidates:
            index = down.selector.select_sum(g, e, x, self._candidates)
        # A vector without elements in this shard still needs a query: all ranks take part in the
        # search of every vector.
        counts = [sizes[rank] for sizes in down.candidates]
        local = torch.split(index, counts)
        bits = torch.split(order_bits(x.index_select(0, index)), counts)
        asked = zip(bits, down.candidates, down.kept, before.tolist(), strict=True)
        found = find_largest(self._exchange, [Query(*each) for each in asked])
        after.copy_(torch.tensor([selection.threshold for selection in found]))
        indices = [
            at.index_select(0, chosen(each, selection.threshold, selection.counts[rank]))
            for at, each, selection in zip(local, bits, found, strict=True)
        ]
        every = [
            found[piece.vector].counts[owner]
            for owner, pieces in enumerate(down.pieces)
            for piece in pieces
        ]
        return joined(indices or [index]), torch.tensor(every, dtype=torch.int64)


def search_load(
    vectors: Iterable[tuple[int, int, int]], itemsize: int, world_size: int, node: int = 1
) -> Load:
    """Estimate the bytes of :func:`find_largest` over the card of a node, for good guesses.

    Args:
        vectors: for each vector, the number of candidates of this node and of all ranks, and k.
        itemsize: bytes of a candidate.
        world_size: number of ranks.
        node: number of ranks of the node.
    """
    load, others = Load(), world_size - node
    for own, total, k in vectors:
        histogram = 4 * _bins(k, world_size)
        # Few candidates are exchanged without a histogram. If all are selected, nothing is sent.
        if k < total and itemsize * total <= histogram * world_size:
            received = itemsize * node * (total - own)
            load.add(Load(sent=itemsize * others * own, received=received))
        elif k < total:
            moved = gathered(histogram, world_size, node)
            load.add(Load(sent=moved, received=moved))
    return load


def _bins(k: int, world_size: int) -> int:
    """Return the number of bins of a histogram, a power of two of at least 32."""
    # The total is smallest if a histogram and the candidates left in one bin take about the same
    # bytes. This number of bins assumes 10 k candidates in the window, which is a rough guess.
    return int(2 ** max(5, (10 * k // world_size).bit_length() // 2))


def _counts(above: Sequence[int], tied: Sequence[int], k: int) -> list[int]:
    """Return the number of selected entries of each rank. Ties go to the lowest ranks.

    Args:
        above: by rank, the number of candidates above the threshold.
        tied: by rank, the number of candidates equal to the threshold.
        k: number of entries to select.
    """
    left, counts = k - sum(above), []
    for strictly, equal in zip(above, tied, strict=True):
        taken = min(equal, left)
        left -= taken
        counts.append(strictly + taken)
    return counts
