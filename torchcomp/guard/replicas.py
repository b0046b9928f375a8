"""Replicas: find parameters that differ between ranks that should have the same."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from torchcomp import host
from torchcomp.exchange import Exchange

_INTEGERS = {1: torch.uint8, 2: torch.int16}
"""What the bits of a value are read as, by its bytes. Longer values are several int32."""

_ROW = 509
"""Length of the rows whose values are added up in int32. Comparisons add up rows and columns in
turns: two other signs cancel in a row, and remain in the columns."""


class Replicas:
    """Compares parameters over the ranks.

    Args:
        tensors: by name, equal on all ranks that have the same shard.
        shard: which shard of the parameters this rank has.
        shards: number of shards that the parameters are cut into.
    """

    def __init__(self, tensors: Mapping[str, Tensor], shard: int = 0, shards: int = 1) -> None:
        self._tensors, self._shard, self._shards = dict(tensors), shard, shards

    def compare(self, exchange: Exchange, dimension: int) -> Callable[[], bool]:
        """Compare digests. All ranks call this.

        Args:
            exchange: the ranks.
            dimension: 0 to add up columns, 1 to add up rows.

        Returns:
            A function that waits for the result: whether all ranks have the same parameters.
        """
        sums = self._sums(exchange, (dimension,))
        digest = _mixed(sums)
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
        sums = self._sums(exchange, (0, 1)).tolist()
        own = self._shard, exchange.global_ranks[exchange.rank], sums
        found: dict[str, tuple[int, ...]] = {}
        for _, same_shard in groupby(sorted(exchange.gather_all(own)), itemgetter(0)):
            _, order, by_rank = zip(*same_shard, strict=True)
            for name, values in zip(self._tensors, zip(*by_rank, strict=True), strict=True):
                usual = max(values, key=values.count)
                wrong = [r for r, value in zip(order, values, strict=True) if value != usual]
                if wrong:
                    found[name] = (*found.get(name, ()), *wrong)
        return found

    def _sums(self, exchange: Exchange, dimensions: Sequence[int]) -> Tensor:
        """Return a checksum of each parameter, as integers."""
        tensors, device = self._tensors.values(), exchange.device
        return torch.stack([_checksum(each, dimensions).to(device) for each in tensors])


def _checksum(values: Tensor, dimensions: Sequence[int]) -> Tensor:
    """Return a sum of the bits of a tensor, which a change of its values changes.

    Args:
        values: of any shape and strides.
        dimensions: 0 to add up columns, 1 to add up rows.
    """
    # In logical order, because replicas can have other strides.
    bits = values.detach().flatten().view(_INTEGERS.get(values.element_size(), torch.int32))
    whole = bits.numel() // _ROW * _ROW
    table, rest = bits[:whole].view(-1, _ROW), bits[whole:]
    # These wrap around, but adding up int32 in int64 would take ten times as long.
    sums = [table.sum(dimension, dtype=torch.int32) for dimension in dimensions]
    return _mixed(torch.cat([*sums, rest]).long())


def _mixed(sums: Tensor) -> Tensor:
    """Return the sum of integers, each with a factor of its own: equal changes do not cancel."""
    return (sums * _factors(len(sums), sums.device)).sum()


@lru_cache(maxsize=1024)
def _factors(count: int, device: torch.device) -> Tensor:
    """Return random odd numbers of 64 bits."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**62), 2**62, (count,), generator=generator)
    return host.copy_to(drawn * 2 + 1, device)
