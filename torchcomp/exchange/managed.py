"""ManagedExchange: the exchange over the group of a torchft Manager, whose ranks come and go."""

from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from torchcomp.exchange.base import Exchange
from torchcomp.exchange.private import ENDED, PrivateExchange
from torchcomp.specs.errors import RankFailureError


class ManagedExchange(PrivateExchange):
    """The exchange over the manager's group, until its ranks change; None: not connected yet."""

    def __init__(self, group: Any, rank: int, world_size: int, device: torch.device) -> None:
        Exchange.__init__(self, rank, world_size, device)
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self._group = ENDED if group is None else group

    def leave(self, error: BaseException) -> None:
        """Do nothing: the manager ends the connections when it configures the group again."""

    def explain(self, call: str, error: Exception) -> None:
        """Raise RankFailureError. Any error ends the step, and the manager decides what is next."""
        raise RankFailureError(
            f"{call} among the {self.world_size} ranks of the manager's group failed on rank "
            f"{self.rank}: another rank has died, or did not answer in time. The manager does not "
            f"count the step, and goes on with the ranks that are left. The backend says: {error}"
        ) from error

    def _all_gather_to(self, received: Tensor, mine: Tensor) -> None:
        # torchft has no other all-gather.
        options = AllgatherOptions()
        collective = self._group.allgather_into_tensor_coalesced
        self._run("all_gather", collective, [received], [mine], options)
