"""Parameters that no rank used in a step (find_unused_parameters=True).

DDP leaves the gradient of such a parameter alone, whatever the hook puts into its bucket. What
error feedback delivers for it in that step would be lost, so it goes back into the memory.
"""

import torch
from torch import Tensor

from torchcomp.bucket import Bucket
from torchcomp.exchange import Exchange
from torchcomp.memory import ErrorMemory


class UnusedWatch:
    """Watches for parameters whose gradient is zero on every rank in this step."""

    def __init__(self) -> None:
        self._parts: dict[str, Tensor] = {}
        self._used: list[Tensor] = []

    def before(self, delivery: Bucket) -> None:
        """Note which parameters of one of DDP's buckets have a gradient on this rank."""
        parts = delivery.parts()
        self._parts.update(parts)
        self._used.extend(part.any() for part in parts.values())

    def give_back(self, exchange: Exchange, memory: ErrorMemory) -> None:
        """Move the means of unused parameters from DDP's buckets into the memory of every rank."""
        used = exchange.any_rank(torch.stack(self._used).to(torch.uint8)).tolist()
        memories = dict(memory.pending())
        for (name, mean), flag in zip(self._parts.items(), used, strict=True):
            if not flag:
                memories[name].add_(mean)
                mean.zero_()
