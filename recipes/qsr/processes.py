"""The comparison on ranks that are processes of this machine."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from comparison import Comparison, Laboratory, compare
from ledger import Ledger, Run
from local_training import Outcome
from task import open_task


def on_processes(arguments: argparse.Namespace, known: dict[Run, Outcome]) -> Comparison:
    """Compare on processes over gloo."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Before torch is imported there: idle threads that spin take the cores from the other ranks.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank_main, args=(folder, arguments, known), nprocs=arguments.ranks)
        comparison: Comparison = torch.load(f"{folder}/comparison.pt", weights_only=False)
    return comparison


def _rank_main(
    rank: int, folder: str, arguments: argparse.Namespace, known: dict[Run, Outcome]
) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=arguments.ranks)
    comparison = on_this_rank(arguments, known)
    if rank == 0:
        torch.save(comparison, f"{folder}/comparison.pt")
    dist.barrier()
    dist.destroy_process_group()


def on_this_rank(arguments: argparse.Namespace, known: dict[Run, Outcome]) -> Comparison:
    """Compare together with the other ranks of the default group; rank 0 speaks and writes."""
    first = dist.get_rank() == 0
    ledger = Ledger(arguments.out / "runs.csv" if first else None, known)
    task = open_task(arguments.dataset, arguments.data, arguments.label_noise)
    laboratory = Laboratory(task, arguments.length, ledger, _printed if first else _unheard)
    return compare(laboratory, arguments.methods, arguments.grid, arguments.seeds)


def _printed(text: str) -> None:
    print(text, flush=True)


def _unheard(text: str) -> None:
    pass
