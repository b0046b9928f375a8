"""ProcessGroupExchange: the exchange over a process group of torch.distributed."""

import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from torchcomp.exchange.base import Exchange
from torchcomp.exchange.failures import explain, report_cause
from torchcomp.exchange.traffic import COPIED
from torchcomp.specs.errors import UnsupportedModelError

# torch 2.13 renamed these collectives and deprecated their old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ProcessGroupExchange(Exchange):
    """The exchange among the ranks of a process group.

    Args:
        group: the process group; None is the default group.
        device: device of the messages; "cuda" for NCCL.

    Attributes:
        backend: name of the backend that moves tensors of this device; empty if there is none.
    """

    family: str  # Under this name, ranks report failures to each other,
    witnesses: tuple[int, ...]  # and these global ranks do.
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
                "only torchcomp.register(model, spec, manager=manager) works"
            ) from None
        super().__init__(dist.get_rank(group), len(ranks), torch.device(device), ranks)
        self.family, self.witnesses = f"torchcomp-group-{members.group_name}", self.global_ranks
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
        known = self.backend in ("gloo", "nccl")
        return group._get_backend(self.device).options._timeout if known else default_pg_timeout

    def leave(self, error: BaseException) -> None:
        """Tell the other ranks, who wait until the timeout: the group belongs to the user."""
        report_cause(self, error)

    def _run(self, call: str, collective: Callable[..., Any], *arguments: Any) -> None:
        # `wait` blocks the host for gloo, and the current stream for NCCL.
        try:
            work = collective(*arguments)
            if work is not None:
                work.wait()
        except Exception as error:
            self.explain(call, error)
            raise

    explain = explain

    def _all_reduce(self, values: Tensor, operation: Any = dist.ReduceOp.SUM) -> None:
        self._run("all_reduce", dist.all_reduce, values, operation, self.group)

    def _all_reduce_mean(self, values: Tensor) -> None:
        self._all_reduce(values, dist.ReduceOp.AVG)

    def _reduce_scatter_to(self, mine: Tensor, values: Tensor) -> None:
        collective = reduce_scatter_single
        self._run("reduce_scatter", collective, mine, values, dist.ReduceOp.SUM, self.group)

    def _all_gather_to(self, received: Tensor, mine: Tensor) -> None:
        self._run("all_gather", all_gather_single, received, mine, self.group)

    def _all_to_all_to(
        self, received: Tensor, outgoing: Tensor, arriving: list[int], sizes: list[int]
    ) -> None:
        collective = dist.all_to_all_single
        self._run("all_to_all", collective, received, outgoing, arriving, sizes, self.group)

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
        # Not torch's, which for NCCL uses the current device, often the same one on all ranks.
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
    # NCCL may fuse the product with an addition, and rounds the reciprocal to 16 bits. The bits are
    # the same where the product is exact: for a power of two, unless it is subnormal, as in fp16.
    if backend != "nccl" or world_size & (world_size - 1):
        return ()
    return torch.float32, torch.float64, torch.bfloat16
