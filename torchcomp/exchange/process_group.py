"""ProcessGroupExchange: the exchange over a process group of torch.distributed."""

import pickle
from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from torchcomp.engine.compat import all_gather_single, reduce_scatter_single
from torchcomp.exchange.base import Exchange
from torchcomp.exchange.failures import explain, explained, report_cause
from torchcomp.exchange.traffic import COPIED
from torchcomp.specs.errors import UnsupportedModelError


class ProcessGroupExchange(Exchange):
    """The exchange among the ranks of a process group.

    Args:
        group: the process group; None is the default group.
        device: device of the messages; "cuda" for NCCL.

    Attributes:
        backend: name of the backend that moves tensors of this device; empty if there is none.
    """

    # Ranks report failures to each other under this name; and the global ranks that do.
    family: str
    witnesses: tuple[int, ...]
    _objects_on: torch.device | None = None  # by default, the device of the messages

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.group = group
        members: Any = group or dist.group.WORLD  # torch 2.6 does not take None here
        try:
            ranks = dist.get_process_group_ranks(members)
        except KeyError:
            raise UnsupportedModelError(
                f"{type(group).__name__} is no process group of torch.distributed. Under torchft, "
                "use torchcomp.register(model, spec, manager=manager); LocalSGD, JointSpar and the "
                "others need a group whose ranks do not change"
            ) from None
        super().__init__(dist.get_rank(group), len(ranks), torch.device(device), ranks)
        # Torch numbers the groups of a job.
        self.family = f"torchcomp-group-{members.group_name}"
        self.witnesses = self.global_ranks
        # Not get_backend: a group that was created without naming a backend has several.
        backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
        self.backend = backends.get(self.device.type, "")
        # States can be large: they take no memory of an accelerator if the group has gloo as well.
        if backends.get("cpu") == "gloo":
            self._objects_on = torch.device("cpu")
        self._averages = averaged_exactly(self.backend, self.world_size)

    @cached_property
    def timeout(self) -> timedelta:
        """The timeout of the group's collectives, or torch's default if the backend has none."""
        group: Any = self.group or dist.group.WORLD
        if self.backend not in ("gloo", "nccl"):
            return default_pg_timeout
        timeout: timedelta = group._get_backend(self.device).options._timeout
        return timeout

    def leave(self, error: BaseException) -> None:
        """Tell the other ranks, who wait until the timeout: the group belongs to the user."""
        report_cause(self, error)

    explain = explain

    @explained("all_reduce")
    def _all_reduce(self, values: Tensor, operation: Any = dist.ReduceOp.SUM) -> None:
        dist.all_reduce(values, operation, group=self.group)

    def _all_reduce_mean(self, values: Tensor) -> None:
        self._all_reduce(values, dist.ReduceOp.AVG)

    @explained("reduce_scatter")
    def _reduce_scatter_to(self, mine: Tensor, values: Tensor) -> None:
        reduce_scatter_single(mine, values, group=self.group)

    @explained("all_gather")
    def _all_gather_to(self, received: Tensor, mine: Tensor) -> None:
        all_gather_single(received, mine, group=self.group)

    @explained("all_to_all")
    def _all_to_all_to(
        self, received: Tensor, outgoing: Tensor, arriving: list[int], sizes: list[int]
    ) -> None:
        dist.all_to_all_single(received, outgoing, arriving, sizes, group=self.group)

    # What follows is the same for private groups.

    def _reduce_scatter(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        if not values.is_cuda or self.backend == "gloo":
            return super()._reduce_scatter(values, dtype)
        mine = values.new_empty(values.numel() // self.world_size)
        self._reduce_scatter_to(mine, values)
        return mine.to(dtype)

    def _all_gather(self, mine: Tensor) -> Tensor:
        # gloo's all-gather is a ring. It moves as many bytes as sending a copy to every rank, but
        # waits for the link's latency world_size - 1 times in a row.
        if not mine.is_cuda and mine.nbytes <= COPIED:
            sizes = [mine.numel()] * self.world_size
            copies = mine.repeat(self.world_size)
            received = torch.empty_like(copies)
            self._all_to_all_to(received, copies, sizes, sizes)
        else:
            received = mine.new_empty(mine.numel() * self.world_size)
            self._all_gather_to(received, mine)
        return received

    def _all_to_all(
        self, outgoing: Tensor, sizes: Sequence[int], arriving: Sequence[int]
    ) -> Tensor:
        # Always pass the split sizes: without them, gloo returns garbage if the number of elements
        # is not divisible by the number of ranks.
        received = outgoing.new_empty(sum(arriving))
        self._all_to_all_to(received, outgoing, list(arriving), list(sizes))
        return received

    def gather_objects(self, value: Any, dst: int | None = None) -> list[Any]:
        # Not torch's, which for NCCL uses the current device: the same one on all ranks of a script
        # that never called torch.cuda.set_device.
        pickled = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        device = self._objects_on or self.device
        pickled = pickled.to(device)
        length = torch.tensor([pickled.numel()], dtype=torch.int64, device=device)
        lengths = self._all_gather(length).tolist()
        receivers = [rank for rank in range(self.world_size) if dst in (None, rank)]
        sizes = [pickled.numel() * (rank in receivers) for rank in range(self.world_size)]
        arriving = [length * (self.rank in receivers) for length in lengths]
        received = self._all_to_all(pickled.repeat(len(receivers)), sizes, arriving).cpu()
        if self.rank not in receivers:
            return []
        return [pickle.loads(part.numpy().tobytes()) for part in torch.split(received, arriving)]


def averaged_exactly(backend: str, world_size: int) -> tuple[torch.dtype, ...]:
    """Return the dtypes of which a backend's own mean has the bits of plain DDP; gloo has none."""
    # NCCL may fuse the product with the first addition, and rounds the reciprocal to 16 bits for
    # 16-bit values. The bits are the same where the product is exact: for a power of two, unless
    # the product is subnormal, which gradients in fp16 often are.
    if backend != "nccl" or world_size & (world_size - 1):
        return ()
    return torch.float32, torch.float64, torch.bfloat16
