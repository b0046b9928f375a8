"""PrivateExchange: the exchange over a group of its own, beside the groups of the user."""

import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    PrefixStore,
)
from torch.distributed import distributed_c10d

from torchcomp.engine.host import Scratch
from torchcomp.exchange.base import Exchange
from torchcomp.exchange.failures import ADVICE, SECONDS, answered, report_cause
from torchcomp.exchange.process_group import ProcessGroupExchange, averaged_exactly
from torchcomp.specs.errors import RankFailureError


class PrivateExchange(ProcessGroupExchange):
    """The exchange among some ranks of the job, over connections that nobody else uses.

    Torch does not know the group: ``new_group`` hangs if ranks have made different numbers of
    calls, and keeps each group until the process ends. Groups whose names are equal up to the first
    slash share their reports of failures.
    """

    _group: Any

    def __init__(self, name: str, ranks: Sequence[int], beside: ProcessGroupExchange) -> None:
        rank = list(ranks).index(dist.get_rank())
        Exchange.__init__(self, rank, len(ranks), beside.device, ranks)
        self.backend, self.timeout = beside.backend, beside.timeout
        self._averages = averaged_exactly(self.backend, self.world_size)
        self.name, self.family = name, name.partition("/")[0]
        self.witnesses = tuple(sorted({*beside.witnesses, *ranks}))
        self._run("connecting", self._connect)

    def _connect(self) -> None:
        store = PrefixStore(self.name, distributed_c10d._get_default_store())
        if self.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self.timeout
            self._group = dist.ProcessGroupNCCL(store, self.rank, self.world_size, options)
        else:
            connect = partial(
                dist.ProcessGroupGloo, store, self.rank, self.world_size, timeout=self.timeout
            )
            # Its own timeout ends it in most cases, but not in all.
            self._group = answered(self.timeout.total_seconds() + SECONDS, connect)
            # A rank that closes before the others are connected would break their connections.
            self._group.barrier().wait()

    def leave(self, error: BaseException) -> None:
        """End this rank's connections, so that the others raise RankFailureError with `error`."""
        if self._group is not ENDED:
            report_cause(self, error)
            self._close()

    def _close(self) -> None:
        self._group = ENDED

    def _all_reduce(self, values: Tensor, operation: Any = dist.ReduceOp.SUM) -> None:
        options = AllreduceOptions()  # the groups of torchft take no defaults
        options.reduceOp = operation
        self._run("all_reduce", self._group.allreduce, [values], options)

    def _reduce_scatter_to(self, mine: Tensor, values: Tensor) -> None:
        self._run("reduce_scatter", self._group._reduce_scatter_base, mine, values)

    def _all_gather_to(self, received: Tensor, mine: Tensor) -> None:
        self._run("all_gather", self._group._allgather_base, received, mine)

    def _all_to_all_to(
        self, received: Tensor, outgoing: Tensor, arriving: list[int], sizes: list[int]
    ) -> None:
        collective, options = self._group.alltoall_base, AllToAllOptions()
        self._run("all_to_all", collective, received, outgoing, arriving, sizes, options)


class InsideExchange(PrivateExchange):
    """The exchange inside a node, of large messages. The next call overwrites what was gathered."""

    def __init__(self, name: str, ranks: Sequence[int], beside: ProcessGroupExchange) -> None:
        super().__init__(name, ranks, beside)
        self._sending, self._receiving = Scratch(), Scratch()

    def _all_gather(self, mine: Tensor) -> Tensor:
        if mine.is_cuda:
            return super()._all_gather(mine)
        # Not gloo's all-gather, which copies what it has received once more, to fresh memory. Its
        # ring would spare a network card, but inside a node there is none.
        copies = self._sending.take(mine.numel() * self.world_size, mine.dtype, mine.device)
        copies.view(self.world_size, -1).copy_(mine)
        sizes = [mine.numel()] * self.world_size
        return self._all_to_all(copies, sizes, sizes)

    def _all_to_all(
        self, outgoing: Tensor, sizes: Sequence[int], arriving: Sequence[int]
    ) -> Tensor:
        received = self._receiving.take(sum(arriving), outgoing.dtype, outgoing.device)
        self._all_to_all_to(received, outgoing, list(arriving), list(sizes))
        return received


class _Ended:
    """Stands for a group that was closed: each of its collectives is an error."""

    def __getattr__(self, name: str) -> Any:
        raise RankFailureError(
            "this exchange has ended, because it was closed or a step of this rank failed: the "
            f"other ranks no longer wait for it. {ADVICE}"
        )


ENDED = _Ended()


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


def new_name(exchange: Exchange) -> str:
    """Return a name for new groups among the ranks of `exchange`, or of its two levels."""
    return f"torchcomp-{exchange.gather_all(uuid.uuid4().hex)[0]}"
