"""Replicas: find parameters that differ between ranks that should have the same."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from torchcomp import host
from torchcomp.exchange import Exchange

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Replicas:
    """Compares parameters over the ranks.

    Args:
        tensors: by name, equal on all ranks.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def compare(self, exchange: Exchange) -> Callable[[], bool]:
        """Compare digests. All ranks call this.

        Returns:
            A function that waits for the result: whether all ranks have the same parameters.
        """
        sums = self._sums(exchange)
        # Odd factors, so that equal changes of two parameters do not cancel each other.
        digest = (sums * (torch.arange(len(sums), device=sums.device) * 2 + 1)).sum()
        # One message finds the minimum as well as the maximum.
        bounds = host.copy_from(exchange.anywhere(torch.stack([digest, -digest])))

        def same() -> bool:
            highest, lowest = bounds().tolist()
            return bool(highest == -lowest)

        return same

    def differing(self, exchange: Exchange) -> dict[str, tuple[int, ...]]:
        """Return the ranks that differ from most others, as numbered in the job, by parameter name.

        All ranks call this. It pickles, and waits: call it only if they differ.
        """
        own = exchange.global_ranks[exchange.rank], self._sums(exchange).tolist()
        order, by_rank = zip(*sorted(exchange.gather_all(own)), strict=True)
        found = {}
        for name, values in zip(self._tensors, zip(*by_rank, strict=True), strict=True):
            usual = max(values, key=values.count)
            ranks = zip(order, values, strict=True)
            wrong = tuple(rank for rank, value in ranks if value != usual)
            if wrong:
                found[name] = wrong
        return found

    def _sums(self, exchange: Exchange) -> Tensor:
        """Return the sum of the bits of each parameter, as integers."""
        # A value that differs changes it, and the order of the values in memory does not.
        sums = [
            each.detach().view(_INTEGERS[each.element_size()]).sum(dtype=torch.int64)
            for each in self._tensors.values()
        ]
        return torch.stack([each.to(exchange.device) for each in sums])
