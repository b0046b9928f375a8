"""Replicas: find parameters that differ between ranks that should have the same."""

from collections.abc import Mapping
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
"""Length of the rows whose values are added up in int32. Two other signs cancel in a row, and
remain in the columns."""

_DIGITS = 5
"""Number of digits of a digest that are sent, of 6 bits each."""


class Replicas:
    """Compares parameters over the ranks.

    Args:
        tensors: by name, equal on all ranks that have the same shard.
        shard: which shard of the parameters this rank has.
        shards: number of shards that the parameters are cut into.
    """

    def __init__(self, tensors: Mapping[str, Tensor], shard: int = 0, shards: int = 1) -> None:
        self._tensors, self._shard, self._shards = dict(tensors), shard, shards

    def digest(self, device: torch.device) -> Tensor:
        """Return numbers (1-D, float32): added up over the ranks, they show whether digests differ.

        Args:
            device: of the result.
        """
        # The upper bits: the lower bits of a product depend on few bits of its factors.
        mixed = _mixed(self._sums(device))
        shifts = torch.arange(64 - 6 * _DIGITS, 64, 6, device=device)
        parts = (mixed >> shifts) % 64
        numbers = torch.zeros(self._shards, 1 + 2 * _DIGITS, device=device)
        numbers[self._shard].copy_(torch.cat([torch.ones_like(parts[:1]), parts, parts.square()]))
        return numbers.view(-1)

    def are_equal(self, sums: Tensor) -> bool:
        """Return whether all ranks have the same digest of their shard.

        Args:
            sums: those of all ranks' :meth:`digest`, on the CPU.
        """
        count, total, squares = torch.split(
            sums.view(self._shards, -1).long(), [1, _DIGITS, _DIGITS], 1
        )
        # The variance is zero. float32 is exact with these numbers, up to 4,200 ranks.
        return torch.equal(count * squares, total.square())

    def differing(self, exchange: Exchange) -> dict[str, tuple[int, ...]]:
        """Return the ranks that differ from most others, as numbered in the job, by parameter name.

        All ranks call this. It pickles, and waits: call it only if they differ.
        """
        own = (
            self._shard,
            exchange.global_ranks[exchange.rank],
            self._sums(exchange.device).tolist(),
        )
        found: dict[str, tuple[int, ...]] = {}
        for _, same_shard in groupby(sorted(exchange.gather_all(own)), itemgetter(0)):
            _, order, by_rank = zip(*same_shard, strict=True)
            for name, values in zip(self._tensors, zip(*by_rank, strict=True), strict=True):
                usual = max(values, key=values.count)
                wrong = [r for r, value in zip(order, values, strict=True) if value != usual]
                if wrong:
                    found[name] = (*found.get(name, ()), *wrong)
        return found

    def _sums(self, device: torch.device) -> Tensor:
        """Return a checksum of each parameter, as integers."""
        return torch.stack([_checksum(each).to(device) for each in self._tensors.values()])


def _checksum(values: Tensor) -> Tensor:
    """Return a sum of the bits of a tensor, which a change of its values changes."""
    # In logical order, because replicas can have other strides.
    bits = values.detach().flatten().view(_INTEGERS.get(values.element_size(), torch.int32))
    whole = bits.numel() // _ROW * _ROW
    table, rest = bits[:whole].view(-1, _ROW), bits[whole:]
    # These wrap around, but adding up int32 in int64 would take ten times as long.
    sums = [table.sum(dimension, dtype=torch.int32) for dimension in (0, 1)]
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
