"""Replicas: find parameters that differ between ranks that should have the same."""

from collections.abc import Callable, Mapping
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from torchcomp import host
from torchcomp.exchange import Exchange

_INTEGERS = {1: torch.uint8, 2: torch.int16}
"""What the bits of a value are read as, by its bytes. Longer values are several int32."""

_ROW = 509
"""Number of values whose bits are added up at a time. It is odd, so that equal changes of all
values, such as another sign or twice the value, do not add up to a multiple of 2**32."""


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
        digest = (sums * _odd(len(sums), sums.device)).sum()
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
        """Return a checksum of each parameter, as integers."""
        return torch.stack([_checksum(each).to(exchange.device) for each in self._tensors.values()])


def _checksum(values: Tensor) -> Tensor:
    """Return a sum of the bits of a tensor, which a change of its values changes."""
    # In logical order, because replicas can have other strides.
    bits = values.detach().flatten().view(_INTEGERS.get(values.element_size(), torch.int32))
    whole = bits.numel() // _ROW * _ROW
    # These wrap around, but adding up int32 in int64 would take ten times as long.
    rows = bits[:whole].view(-1, _ROW).sum(1, dtype=torch.int32)
    sums = torch.cat([rows, bits[whole:].sum(0, keepdim=True, dtype=torch.int32)]).long()
    return (sums * _odd(len(sums), sums.device)).sum()


def _odd(count: int, device: torch.device) -> Tensor:
    """Return odd numbers, by which sums are multiplied: equal changes then do not cancel."""
    return torch.arange(count, device=device) * 2 + 1
