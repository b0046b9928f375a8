"""This process in a distributed run: its rank, its device, and the process group it joins."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from recipes.errors import RecipeError
from recipes.settings import Settings


@dataclass(frozen=True)
class Worker:
    """One process of a run. Without torchrun, this process is the only worker."""

    rank: int  # index among all workers, from 0
    world_size: int  # number of workers
    local_world_size: int  # number of workers on this machine
    device: torch.device  # where this worker's model is

    @property
    def is_main(self) -> bool:
        """Whether this worker prints and writes the files of the run."""
        return self.rank == 0


def env_rank() -> int:
    """Return the rank that torchrun gave this process, or 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def env_world_size() -> int:
    """Return the number of processes that torchrun started, or 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def this_worker(settings: Settings) -> Worker:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return Worker(
        rank=env_rank(),
        world_size=env_world_size(),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
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
            f"local rank {local_rank} has no CUDA device: this machine has "
            f"{torch.cuda.device_count()}; use that --nproc-per-node, or --device cpu"
        )
    return torch.device("cuda", local_rank)


def threads_per_worker(settings: Settings, worker: Worker) -> int:
    """Return ``--threads``, or an equal share of this machine's cores."""
    # Not os.cpu_count(), which ignores the limits of containers and of taskset.
    return settings.threads or max(1, len(os.sched_getaffinity(0)) // worker.local_world_size)


def init_distributed(worker: Worker, timeout: int = 0) -> None:
    """Initialize the default process group: NCCL on GPUs, gloo on CPUs."""
    if worker.device.type == "cuda":
        # Before any other CUDA call, which would create a context on GPU 0.
        torch.cuda.set_device(worker.device)
        init_process_group("nccl", timeout, worker.device)
    else:
        init_process_group("gloo", timeout)


def init_process_group(backend: str, timeout: int, device_id: torch.device | None = None) -> None:
    """Initialize the default process group, also without torchrun."""
    limit = timedelta(seconds=timeout) if timeout else None
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=limit, device_id=device_id)
    else:
        # Without torchrun there is no rendezvous. A store in memory needs no port.
        store = dist.HashStore()
        alone = {"store": store, "rank": 0, "world_size": 1}
        dist.init_process_group(backend, timeout=limit, device_id=device_id, **alone)


def cleanup_distributed() -> None:
    """Destroy the process group on all ranks. Delete every DDP model first."""
    # Without the barrier, or while a DDP model is alive, gloo sometimes aborts the process here.
    dist.barrier()
    dist.destroy_process_group()
