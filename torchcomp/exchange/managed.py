"""ManagedExchange: the exchange over the group of a torchft Manager, whose ranks come and go."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    ReduceScatterOptions,
)

from torchcomp.exchange.base import Exchange
from torchcomp.exchange.private import PrivateExchange


class CollectiveError(RuntimeError):
    """A collective of a managed group failed: a rank has died, or did not answer in time."""


class ManagedExchange(PrivateExchange):
    """The exchange among the ranks that a Manager has brought together, until they change.

    The group belongs to the manager, which configures it again when a rank joins, leaves or dies.

    Args:
        group: the manager's process group. None stands for ranks that are not connected yet.
        rank: rank of this process in it.
        world_size: its number of ranks.
        device: the device of the messages.
    """

    def __init__(self, group: Any, rank: int, world_size: int, device: torch.device) -> None:
        Exchange.__init__(self, rank, world_size, device)
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self._own = group

    # The process groups of torchft are Python classes, which take options and no defaults.

    def _all_reduce(self, values: Tensor) -> None:
        with _failing():
            self._own.allreduce([values], AllreduceOptions()).wait()

    def _reduce_scatter_to(self, mine: Tensor, values: Tensor) -> None:
        with _failing():
            work = self._own.reduce_scatter_tensor_coalesced(
                [mine], [values], ReduceScatterOptions()
            )
            work.wait()

    def _all_gather_to(self, received: Tensor, mine: Tensor) -> None:
        with _failing():
            work = self._own.allgather_into_tensor_coalesced([received], [mine], AllgatherOptions())
            work.wait()

    def _all_to_all_to(
        self, received: Tensor, outgoing: Tensor, arriving: list[int], sizes: list[int]
    ) -> None:
        with _failing():
            work = self._own.alltoall_base(received, outgoing, arriving, sizes, AllToAllOptions())
            work.wait()


@contextmanager
def _failing() -> Iterator[None]:
    """Raise the errors of a collective as CollectiveError."""
    try:
        yield
    except Exception as error:
        raise CollectiveError(f"a collective with the manager's group failed: {error}") from error
