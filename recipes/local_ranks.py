"""Work on ranks that are processes of this machine and talk over gloo."""

import os
import tempfile
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_Result = TypeVar("_Result")
# Idle threads that spin would take the cores from the other ranks.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "GLOO_SOCKET_IFNAME": "lo",
}


def run_on_ranks(count: int, work: Callable[..., _Result], *args: Any) -> list[_Result]:
    """Call ``work(*args)`` on ``count`` ranks of a default group; return their results, by rank.

    Every rank has one thread. ``work`` must be found by its name in its module: it goes to the
    other processes by pickle, as ``args`` do, and as the results come back.
    """
    # Here, and not there: OpenMP reads them as torch is imported.
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank_main, args=(count, folder, work, args), nprocs=count)
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(count)]


def _rank_main(
    rank: int, count: int, folder: str, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
    torch.save(work(*args), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
