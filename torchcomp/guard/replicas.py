"""Replicas: find parameters that differ between ranks that should have the same."""

from collections.abc import Mapping
from functools import lru_cache
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from torchcomp.engine import host
from torchcomp.exchange import Exchange

# What the bits of a value are read as, by its bytes. Longer values are several int32.
_INTEGERS = {1: torch.uint8, 2: torch.int16}
# Length of the rows and columns that are added up. Two other signs cancel in one of them only.
_ROW = 509


class Replicas:
    """Compares parameters over the ranks that have the same shard, if there are shards."""

    def __init__(self, tensors: Mapping[str, Tensor], shard: int | None = None) -> None:
        self._tensors, self._shard = dict(tensors), shard

    def differing(self, exchange: Exchange) -> dict[str, tuple[int, ...]]:
        """Return the ranks (of the job) that differ from most others, by name. All call this."""
        device = exchange.device
        sums = torch.stack([_checksum(each).to(device) for each in self._tensors.values()])
        # Without the lower bits, which depend on few bits of the factors.
        digest = _mixed(sums) >> 2
        combine = exchange.all_reduce_max if self._shard is None else exchange.level_max
        highest, lowest = combine(torch.stack([digest, -digest])).unbind()
        if not exchange.all_reduce_max((highest != -lowest).to(torch.uint8).view(1)).any():
            return {}
        own = self._shard, exchange.global_ranks[exchange.rank], sums.tolist()
        found: dict[str, tuple[int, ...]] = {}
        for _, same_shard in groupby(sorted(exchange.gather_all(own)), itemgetter(0)):
            _, order, by_rank = zip(*same_shard, strict=True)
            for name, values in zip(self._tensors, zip(*by_rank, strict=True), strict=True):
                usual = max(values, key=values.count)
                wrong = [r for r, value in zip(order, values, strict=True) if value != usual]
                if wrong:
                    found[name] = (*found.get(name, ()), *wrong)
        return found


def _checksum(values: Tensor) -> Tensor:
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
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**62), 2**62, (count,), generator=generator)
    return host.copy_to(drawn * 2 + 1, device)
