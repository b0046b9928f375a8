"""ManagedExchange: the exchange over the group of a torchft Manager, whose ranks come and go."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions

from torchcomp.exchange.base import Exchange, explained
from torchcomp.exchange.private import ENDED, PrivateExchange
from torchcomp.specs.errors import RankFailureError


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
        self._group = ENDED if group is None else group

    def leave(self, error: BaseException) -> None:
        """Do nothing: the manager ends the connections when it configures the group again."""

    def explain(self, call: str, error: Exception) -> None:
        """Raise RankFailureError. Any error ends the step, and the manager decides what is next."""
        raise RankFailureError(
            f"a collective among the {self.world_size} ranks of the manager's group failed on "
            f"rank {self.rank}: another rank has died, or did not answer in time. The manager "
            "does not count the step, and the next one is among the ranks that are left. The "
            f"backend says: {error}"
        ) from error

    # The process groups of torchft are Python classes, which take options and no defaults.

    @explained("all_reduce")
    def _all_reduce(self, values: Tensor, operation: Any = dist.ReduceOp.SUM) -> None:
        options = AllreduceOptions()
        options.reduceOp = operation
        self._group.allreduce([values], options).wait()

    def _start_all_reduce(self, values: Tensor) -> Callable[[], None]:
        # The manager asks for the failures of a step before the next one begins.
        return Exchange._start_all_reduce(self, values)

    @explained("all_gather")
    def _all_gather_to(self, received: Tensor, mine: Tensor) -> None:
        options = AllgatherOptions()
        self._group.allgather_into_tensor_coalesced([received], [mine], options).wait()

    @explained("all_to_all")
    def _all_to_all_to(
        self, received: Tensor, outgoing: Tensor, arriving: list[int], sizes: list[int]
    ) -> None:
        options = AllToAllOptions()
        self._group.alltoall_base(received, outgoing, arriving, sizes, options).wait()
