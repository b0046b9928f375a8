"""Run the comparison on ranks that are processes of this machine."""

import argparse

import torch.distributed as dist

from recipes.experiments import ResultTable
from recipes.local_ranks import run_on_ranks
from recipes.qsr.comparison import Comparison, Laboratory, compare
from recipes.qsr.ledger import Ledger
from recipes.qsr.task import open_task


def on_processes(arguments: argparse.Namespace, table: ResultTable) -> Comparison:
    """Run the comparison on processes over gloo."""
    return run_on_ranks(arguments.ranks, on_this_rank, arguments, table)[0]


def on_this_rank(arguments: argparse.Namespace, table: ResultTable) -> Comparison:
    """Run the comparison as one rank of the default group; rank 0 prints and saves."""
    first = dist.get_rank() == 0
    ledger = Ledger(table, saves=first)
    task = open_task(arguments.dataset, arguments.data, arguments.label_noise)
    laboratory = Laboratory(task, arguments.length, ledger, _print if first else _ignore)
    return compare(laboratory, arguments.methods, arguments.grid, arguments.seeds)


def _print(text: str) -> None:
    # The parent's output is often a pipe, where lines would otherwise wait in the buffer.
    print(text, flush=True)


def _ignore(text: str) -> None:
    pass
