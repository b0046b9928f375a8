"""Job: this process among the ranks that torchrun started, and the store that connects them.

Everything before the process group goes through the store, with short timeouts: a rank or a link
that is lost is named, where ``init_process_group`` would hang.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.rendezvous import rendezvous

from torchcomp.specs.errors import SpecError


class NotMeasured(RuntimeError):
    """The job cannot be measured: a rank is missing, or a script failed."""


@dataclass(frozen=True)
class Job:
    """This rank, and how it reaches the others before there is a process group."""

    rank: int
    world_size: int
    local_rank: int
    node: int
    backend: str  # "gloo" or "nccl"
    timeout: float  # seconds that one answer of another rank can take
    store: Any  # of torch.distributed; its keys are doctor's alone

    @property
    def device(self) -> torch.device:
        cuda = self.backend == "nccl"
        return torch.device("cuda", self.local_rank) if cuda else torch.device("cpu")

    @property
    def patience(self) -> float:
        """Seconds to wait for ranks that work on something else, or that start."""
        return 4 * self.timeout

    def gather(self, name: str, value: Any, seconds: float | None = None) -> list[Any]:
        """Return every rank's `value`, which fits into JSON, in rank order; use a name once."""
        keys = [f"{name}/{rank}" for rank in range(self.world_size)]
        seconds = self.patience if seconds is None else seconds
        try:
            self.store.set(keys[self.rank], json.dumps(value))
            self.store.wait(keys, timedelta(seconds=seconds))
        except dist.DistStoreError:
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            raise NotMeasured(
                f"{ranks_named(missing)} of {self.world_size} did not report {name!r} within "
                f"{seconds:.0f} s: look at the logs of these ranks"
            ) from None
        except dist.DistError as error:
            raise NotMeasured(f"the store of the job was lost: {error}") from None
        return [json.loads(text) for text in self.store.multi_get(keys)]

    def barrier(self, name: str, seconds: float | None = None) -> None:
        self.gather(name, None, seconds)

    def is_first(self, name: str) -> bool:
        """Return whether no other rank has asked this with the same name."""
        try:
            return int(self.store.add(f"{name}/asked", 1)) == 1
        except dist.DistError:
            return self.rank == 0  # without the store, nobody knows


def join(backend: str | None, timeout: float) -> Job:
    """Find the other ranks, as torchrun's variables describe them; without them, be alone."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")
    rank, world_size, local_rank, node = (
        int(os.environ.get(name, name == "WORLD_SIZE")) for name in names
    )
    has_gpu = torch.cuda.device_count() > local_rank
    if backend is None:
        backend = "nccl" if has_gpu else "gloo"
    elif backend == "nccl" and not has_gpu:
        raise SpecError(
            f"--backend nccl: local rank {local_rank} has no GPU, this machine has "
            f"{torch.cuda.device_count()}. Start fewer ranks per node, or take --backend gloo"
        )
    store = HashStore() if world_size == 1 else _store(rank, world_size, 4 * timeout)
    return Job(rank, world_size, local_rank, node, backend, timeout, store)


def _store(rank: int, world_size: int, seconds: float) -> Any:
    try:
        limit = timedelta(seconds=seconds)
        store, *_ = next(iter(rendezvous("env://", rank, world_size, timeout=limit)))
    except (dist.DistError, RuntimeError, ValueError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise NotMeasured(
            f"rank {rank} cannot reach the store of the job at {address}, which rank 0 or torchrun "
            f"keeps there: check the address, the port and the firewall. {error}"
        ) from None
    # Keys apart from those of the process groups of a user's script.
    return PrefixStore("torchcomp-doctor", store)


def ranks_named(ranks: Sequence[int]) -> str:
    """Return ranks as words, such as "rank 3" or "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"
