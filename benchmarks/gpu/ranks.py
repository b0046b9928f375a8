"""Ranks that exist only in name: what one rank computes in a step among many, on one device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchcomp.exchange import Exchange


class Echo(Exchange):
    """Rank 0 of `world_size` ranks. The others send what rank 0 sends to itself.

    Everything but the network is done as in training: all messages are encoded, checked, decoded
    and added up. All shards of a bucket must have the same number of elements.

    Args:
        world_size: number of ranks.
        device: device of the messages.
    """

    def __init__(self, world_size: int, device: torch.device) -> None:
        super().__init__(0, world_size, device)

    def _all_reduce(self, values: Tensor) -> None:
        values.mul_(self.world_size)

    def _all_gather(self, mine: Tensor) -> Tensor:
        return mine.repeat(self.world_size)

    def _all_to_all(
        self, outgoing: Tensor, sizes: Sequence[int], arriving: Sequence[int]
    ) -> Tensor:
        return outgoing[: sizes[0]].repeat(self.world_size)

    def gather_objects(self, value: Any, dst: int | None = None) -> list[Any]:
        return [value] * self.world_size
