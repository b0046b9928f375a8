"""Job: this process among the ranks that torchrun started, and the store that connects them.

Everything before the process group goes through the store, with short timeouts: a rank or a link
that is lost is named, where ``init_process_group`` would hang.
"""

import json
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.rendezvous import rendezvous

from torchcomp.errors import SpecError

Store = Any
"""A store of torch.distributed. Its methods have no types in torch 2.6."""


class NotMeasured(RuntimeError):
    """The job cannot be measured: a rank is missing, or a script failed."""


@dataclass(frozen=True)
class Job:
    """This rank, and how it reaches the others before there is a process group.

    Attributes:
        rank: this rank.
        world_size: number of ranks.
        local_rank: number of this rank on its node.
        node: number of its node.
        backend: "gloo" or "nccl".
        timeout: seconds that one answer of another rank can take.
        store: the store of the job; its keys are those of doctor only.
    """

    rank: int
    world_size: int
    local_rank: int
    node: int
    backend: str
    timeout: float
    store: Store

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return torch.device("cuda", self.local_rank) if self.backend == "nccl" else _CPU

    @property
    def patience(self) -> float:
        """Seconds to wait for ranks that work on something else, or that start."""
        return 4 * self.timeout

    def gather(self, name: str, value: Any, seconds: float | None = None) -> list[Any]:
        """Return every rank's `value`, in rank order. It must fit into JSON.

        Args:
            name: name of the values, used once.
            value: that of this rank.
            seconds: how long to wait for the others, by default :attr:`patience`.

        Raises:
            NotMeasured: if a rank is missing, with the names of all that are.
        """
        keys = [f"{name}/{rank}" for rank in range(self.world_size)]
        seconds = self.patience if seconds is None else seconds
        try:
            self.store.set(keys[self.rank], json.dumps(value))
            self.store.wait(keys, timedelta(seconds=seconds))
        except dist.DistStoreError:
            there = [self.store.check([key]) for key in keys]
            missing = [rank for rank, found in enumerate(there) if not found]
            raise NotMeasured(
                f"{ranks_named(missing)} of {self.world_size} did not report {name!r} within "
                f"{seconds:.0f} s: look at the logs of these ranks"
            ) from None
        except dist.DistError as error:
            raise NotMeasured(f"the store of the job was lost: {error}") from None
        return [json.loads(text) for text in self.store.multi_get(keys)]

    def barrier(self, name: str, seconds: float | None = None) -> None:
        """Wait until every rank is here."""
        self.gather(name, None, seconds)

    def is_first(self, name: str) -> bool:
        """Return whether no other rank has asked this with the same name."""
        try:
            return int(self.store.add(f"{name}/asked", 1)) == 1
        except dist.DistError:
            return self.rank == 0  # without the store, nobody knows


_CPU = torch.device("cpu")


def join(backend: str | None, timeout: float) -> Job:
    """Find the other ranks, as torchrun's variables describe them; without them, be alone.

    Args:
        backend: "gloo" or "nccl"; None takes NCCL if this rank has a GPU.
        timeout: see :class:`Job`.

    Raises:
        SpecError: if this rank lacks the GPU that "nccl" needs.
        NotMeasured: if the store of the job cannot be reached.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if backend is None:
        backend = "nccl" if torch.cuda.device_count() > local_rank else "gloo"
    elif backend == "nccl" and torch.cuda.device_count() <= local_rank:
        raise SpecError(
            f"--backend nccl: local rank {local_rank} has no GPU, this machine has "
            f"{torch.cuda.device_count()}. Start fewer ranks per node, or take --backend gloo"
        )
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    node = int(os.environ.get("GROUP_RANK", "0"))
    store = _store(rank, world_size, timeout)
    return Job(rank, world_size, local_rank, node, backend, timeout, store)


def _store(rank: int, world_size: int, timeout: float) -> Store:
    if world_size == 1:
        return HashStore()
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        limit = timedelta(seconds=4 * timeout)
        store, *_ = next(iter(rendezvous("env://", rank, world_size, timeout=limit)))
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise NotMeasured(
            f"rank {rank} cannot reach the store of the job at {address}, which rank 0 or torchrun "
            f"keeps there: check the address, the port and the firewall. {error}"
        ) from None
    # Keys apart from those of the process groups of a user's script.
    return PrefixStore("torchcomp-doctor", store)


def ranks_named(ranks: list[int] | tuple[int, ...]) -> str:
    """Return ranks as words, such as "rank 3" or "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"
