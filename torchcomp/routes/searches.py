"""Searches: distributed selection of the k largest entries of vectors. Ties go to the lowest index.

Each rank contributes the candidates of its part, as integers with the order of the magnitudes.

The ranks all-gather histograms of an interval that contains the k-th largest, narrow it to one bin,
and repeat until few candidates are left, which they all-gather. The first histogram covers a window
around the previous step's threshold. With a good guess, this takes two collectives. On accelerators
with Triton, :class:`torchcomp.kernels.selection_triton.Search` runs instead, without a wait.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcomp.compressors.base import Vectors
from torchcomp.engine import host
from torchcomp.exchange import Exchange
from torchcomp.exchange.traffic import Load, gathered
from torchcomp.routes.shards import Direction

# log2 of the width of a window of two octaves, by bytes of a candidate. One octave, a factor of 2,
# is 2^23 steps in the bits of a float32 and 2^52 in those of a float64.
_WINDOW_BITS = {4: 24, 8: 53}


def order_bits(x: Tensor) -> Tensor:
    """Return non-negative int64 (of float64) or int32 with the order of |x|; a NaN is infinity."""
    # The bits of non-negative IEEE floats, read as integers, have the same order as the floats.
    wide = x.abs().to(torch.promote_types(x.dtype, torch.float32))
    wide.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    return wide.view(torch.int64 if wide.dtype == torch.float64 else torch.int32)


class Search:
    """The interval [low, high) that contains the k-th largest candidate of a vector."""

    def __init__(self, candidates: Tensor, sizes: Sequence[int], k: int, guess: int) -> None:
        self.candidates, self._k = np.sort(candidates.numpy()), k
        self.inside = np.array(sizes)
        self.above = np.zeros_like(self.inside)
        self._needed = k < sum(sizes)
        # Above every candidate, because the bits of infinity are less than the maximum.
        self.low, self._high = 0, int(np.iinfo(self.candidates.dtype).max)
        self.bins = _bins(k, len(sizes))
        if guess:
            shift = _WINDOW_BITS[self.candidates.itemsize] - self.bins.bit_length() + 1
            self._divide(max(0, guess - (self.bins // 2 << shift)), shift)
        else:
            self._fill_interval()

    @property
    def open(self) -> bool:
        """Whether the k-th largest is not known yet."""
        return self._needed and self._high - self.low > 1

    @property
    def wide(self) -> bool:
        """Whether the candidates left take more bytes than another histogram."""
        left = self.candidates.itemsize * self.inside.sum()
        return self.open and bool(left > 4 * self.bins * len(self.inside))

    def histogram(self) -> Tensor:
        """Return the number of this rank's candidates per bin."""
        counts = np.diff(np.searchsorted(self.candidates, self._edges))
        return torch.from_numpy(counts.astype(np.int32))

    def narrow(self, histograms: Tensor, rank: int) -> None:
        """Narrow the interval to the bin of the k-th largest, from the histograms of all ranks."""
        counts = histograms.numpy()
        at_least = self.above.sum() + counts.sum(0)[::-1].cumsum()[::-1]
        found = int((at_least[1:] >= self._k).sum())
        self.above = self.above + counts[:, found + 1 :].sum(1)
        self.inside = counts[:, found].astype(np.int64)
        self.low, self._high = self._edges[found : found + 2].tolist()
        start, stop = np.searchsorted(self.candidates, self._edges[found : found + 2])
        # The other ranks expect as many as they read, even if the number was damaged on the way.
        self.candidates = np.resize(self.candidates[start:stop], self.inside[rank])
        self._fill_interval()

    def decide(self, remaining: Sequence[Any]) -> None:
        """Find the k-th largest among every rank's candidates in the interval."""
        ascending = np.sort(np.concatenate(remaining))
        self.low = int(ascending[self.above.sum() - self._k])
        self.above = self.above + [(part > self.low).sum() for part in remaining]
        self.inside = np.array([(part == self.low).sum() for part in remaining])

    def counts(self) -> Any:
        """Return the number of selected entries of each rank. Ties go to the lowest ranks."""
        before = self.inside.cumsum() - self.inside
        return self.above + np.clip(self._k - self.above.sum() - before, 0, self.inside)

    def _fill_interval(self) -> None:
        """Choose the narrowest bins that cover the interval."""
        width = self._high - self.low
        self._divide(self.low, max(0, (-(-width // self.bins) - 1).bit_length()))

    def _divide(self, start: int, shift: int) -> None:
        """Divide the interval at multiples of 2^shift from `start`, of which any will do."""
        edges = start + np.minimum(np.arange(self.bins + 1) << shift, self._high - start)
        edges[0], edges[-1] = self.low, self._high
        self._edges = edges.astype(self.candidates.dtype)


def find_largest(exchange: Exchange, searches: Sequence[Search]) -> None:
    """End the searches for the same vectors on all ranks. They share messages, to save latency."""
    while wide := [search for search in searches if search.wide]:
        mine = torch.cat([search.histogram() for search in wide])
        rows = exchange.all_gather_rows(mine.to(exchange.device)).cpu()
        for search, columns in zip(wide, torch.split(rows, [s.bins for s in wide], 1), strict=True):
            search.narrow(columns, exchange.rank)
    if left := [search for search in searches if search.open]:
        mine = torch.from_numpy(np.concatenate([search.candidates for search in left]))
        counts = np.stack([search.inside for search in left], 1)  # by rank and vector
        rows = exchange.all_gather_v(mine.to(exchange.device), counts.sum(1).tolist())
        parts = np.split(rows.cpu().numpy(), counts.ravel().cumsum()[:-1])
        for i, search in enumerate(left):
            search.decide(parts[i :: len(left)])


class HostSearch:
    """The search for the entries of a bucket's downlink, decided on the host."""

    def __init__(self, down: Direction, exchange: Exchange, device: torch.device) -> None:
        self._down, self._exchange, self._device = down, exchange, device
        most = [place.k for place in down.places(exchange.rank, False)]
        candidates = down.counted(exchange.rank, most)
        self._candidates = Vectors(candidates, device, down.shape.dtype)

    def __call__(
        self, g: Tensor, e: Tensor, x: Tensor, before: Tensor, after: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write ``g + e`` to `x`, and select from the whole bucket, together with all owners.

        `before` has the last step's threshold of each vector, and `after` receives this one's; 0
        for none. Return the indices of this owner's entries, and the counts in all pieces.
        """
        down, rank = self._down, self._exchange.rank
        index = torch.empty(0, dtype=torch.int64, device=self._device)  # a shard can be empty
        if not down.kept:
            return index, index
        if self._candidates:
            index = down.compressor.select_sum(g, e, x, self._candidates)
        # A vector without elements in this shard needs a search too: all ranks take part in each.
        sizes = [counts[rank] for counts in down.candidates]
        bits = torch.split(order_bits(x.index_select(0, index)).cpu(), sizes)
        asked = zip(bits, down.candidates, down.kept, before.tolist(), strict=True)
        searches = [Search(*each) for each in asked]
        find_largest(self._exchange, searches)
        after.copy_(torch.tensor([search.low for search in searches]))
        counts = [search.counts().tolist() for search in searches]
        chosen, first = [], 0
        for keys, search, count in zip(bits, searches, counts, strict=True):
            above, tied = keys > search.low, keys == search.low
            # Of those that are equal, the first ones.
            mask = above | (tied & (tied.cumsum(0) <= count[rank] - above.sum()))
            # As many as announced: counts that were damaged on the way must not lead outside.
            found = torch.nonzero_static(mask, size=count[rank], fill_value=0)[:, 0]
            chosen.append(found + first)
            first += len(keys)
        every = [counts[p.vector][owner] for owner, its in enumerate(down.pieces) for p in its]
        found = host.copy_to(torch.cat(chosen), self._device)
        return index.index_select(0, found), torch.tensor(every, dtype=torch.int64)


def search_load(
    vectors: Iterable[tuple[int, int, int]], itemsize: int, world_size: int, node: int = 1
) -> Load:
    """Estimate the bytes of :func:`find_largest` over the card of a node, for good guesses."""
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
    # A histogram and the candidates left in one bin should take about the same bytes. This assumes
    # 10 k candidates in the window, which is a rough guess.
    return int(2 ** max(5, (10 * k // world_size).bit_length() // 2))
