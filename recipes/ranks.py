"""This process among the ranks of a run: where it stands, what it runs on, how it joins."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from recipes.errors import RecipeError
from recipes.settings import Settings


@dataclass(frozen=True)
class Ranks:
    """One rank's place; a process without torchrun is the only rank."""

    rank: int
    count: int
    local_rank: int
    local_count: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this rank reports for all."""
        return self.rank == 0


def rank_in_environment() -> int:
    """Return the rank that torchrun gave this process, or 0."""
    return int(os.environ.get("RANK", "0"))


def count_in_environment() -> int:
    """Return the number of ranks that torchrun started, or 1."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def place(settings: Settings) -> Ranks:
    """Read this process's place from torchrun's environment."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return Ranks(
        rank=rank_in_environment(),
        count=count_in_environment(),
        local_rank=local_rank,
        local_count=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        device=_device(settings, local_rank),
    )


def _device(settings: Settings, local_rank: int) -> torch.device:
    available = torch.cuda.is_available()
    if settings.device == "cuda" and not available:
        raise RecipeError("--device cuda: torch finds no CUDA device here; use --device cpu")
    if settings.device == "cpu" or not available:
        if settings.amp == "fp16":
            raise RecipeError("--amp fp16 needs a CUDA device; on a CPU use --amp bf16 or off")
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise RecipeError(
            f"rank {local_rank} of this machine has no CUDA device: it has "
            f"{torch.cuda.device_count()}; start as many processes, or use --device cpu"
        )
    return torch.device("cuda", local_rank)


def threads_of(settings: Settings, ranks: Ranks) -> int:
    """Return how many threads a rank computes with: this machine's cores, shared."""
    return settings.threads or max(1, len(os.sched_getaffinity(0)) // ranks.local_count)


def join(ranks: Ranks) -> None:
    """Join the process group: NCCL between GPUs, gloo between CPUs."""
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
        _init("nccl", ranks, device_id=ranks.device)
    else:
        _init("gloo", ranks)


def _init(backend: str, ranks: Ranks, device_id: torch.device | None = None) -> None:
    if "RANK" in os.environ:
        dist.init_process_group(backend, device_id=device_id)
    else:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=device_id)


def leave() -> None:
    """Leave the process group together; drop every DDP model first, or gloo may abort."""
    dist.barrier()
    dist.destroy_process_group()
