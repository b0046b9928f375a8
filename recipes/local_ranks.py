"""Run a function on several ranks, as processes on this machine with a gloo process group."""

import os
import tempfile
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_Result = TypeVar("_Result")
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Idle OpenMP threads that spin would take the cores from the other ranks.
    "OMP_WAIT_POLICY": "passive",
    # All ranks are on this machine, whose host name need not resolve to an address.
    "GLOO_SOCKET_IFNAME": "lo",
}


def run_on_ranks(world_size: int, function: Callable[..., _Result], *args: Any) -> list[_Result]:
    """Call ``function(*args)`` on ``world_size`` ranks and return the results in rank order."""
    # In the parent, because OpenMP reads its variables when a child imports torch.
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank_main, args=(world_size, folder, function, args), nprocs=world_size)
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(world_size)]


def _rank_main(
    rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    # A file store needs no free port.
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    torch.save(function(*args), f"{folder}/{rank}.pt")
    # Without the barrier, gloo sometimes aborts a rank whose peer has already gone.
    dist.barrier()
    dist.destroy_process_group()
