"""The comparison on ranks that are processes of this machine."""

import argparse

import torch.distributed as dist

from recipes.local_ranks import run_on_ranks
from recipes.qsr.comparison import Comparison, Laboratory, compare
from recipes.qsr.ledger import Ledger, Run
from recipes.qsr.local_training import Outcome
from recipes.qsr.task import open_task


def on_processes(arguments: argparse.Namespace, known: dict[Run, Outcome]) -> Comparison:
    """Compare on processes over gloo."""
    return run_on_ranks(arguments.ranks, on_this_rank, arguments, known)[0]


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
