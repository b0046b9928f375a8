"""Replicas: find parameters that differ between ranks that should have the same."""

from collections.abc import Callable, Mapping
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from torchcomp import host
from torchcomp.exchange import Exchange

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The sum wraps around. Wider than the values only where that could hide a change: converting takes
# ten times as long as adding.
_SUMS = {1: torch.int32, 2: torch.int32, 4: torch.int32, 8: torch.int64}


class Replicas:
    """Compares parameters over the ranks.

    Args:
        tensors: by name, equal on all ranks that have the same shard.
        shard: which shard of the parameters this rank has.
        shards: number of shards that the parameters are cut into.
    """

    def __init__(self, tensors: Mapping[str, Tensor], shard: int = 0, shards: int = 1) -> None:
        self._tensors, self._shard, self._shards = dict(tensors), shard, shards

    def compare(self, exchange: Exchange) -> Callable[[], bool]:
        """Compare digests. All ranks call this.

        Returns:
            A function that waits for the result: whether all ranks have the same parameters.
        """
        sums = self._sums(exchange)
        # Odd factors, so that equal changes of two parameters do not cancel each other.
        digest = (sums * (torch.arange(len(sums), device=sums.device) * 2 + 1)).sum()
        # One message finds the minimum as well as the maximum, of each shard.
        own = sums.new_full((self._shards, 2), torch.iinfo(sums.dtype).min)
        own[self._shard].copy_(torch.stack([digest, -digest]))
        bounds = host.copy_from(exchange.anywhere(own.view(-1)))

        def same() -> bool:
            highest, lowest = bounds().view(-1, 2).unbind(1)
            return bool((highest == -lowest).all())

        return same

    def differing(self, exchange: Exchange) -> dict[str, tuple[int, ...]]:
        """Return the ranks that differ from most others, as numbered in the job, by parameter name.

        All ranks call this. It pickles, and waits: call it only if they differ.
        """
        own = self._shard, exchange.global_ranks[exchange.rank], self._sums(exchange).tolist()
        found: dict[str, tuple[int, ...]] = {}
        for _, same_shard in groupby(sorted(exchange.gather_all(own)), itemgetter(0)):
            _, order, by_rank = zip(*same_shard, strict=True)
            for name, values in zip(self._tensors, zip(*by_rank, strict=True), strict=True):
                usual = max(values, key=values.count)
                wrong = [r for r, value in zip(order, values, strict=True) if value != usual]
                if wrong:
                    found[name] = (*found.get(name, ()), *wrong)
        return found

    def _sums(self, exchange: Exchange) -> Tensor:
        """Return the sum of the bits of each parameter, as integers."""
        # A value that differs changes it, and the order of the values in memory does not.
        sums = []
        for each in self._tensors.values():
            size = each.element_size()
            total = each.detach().view(_INTEGERS[size]).sum(dtype=_SUMS[size])
            sums.append(total.to(exchange.device, torch.int64))
        return torch.stack(sums)
