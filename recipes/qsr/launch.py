"""Run studies: in this process, or on ranks that are processes of this machine."""

import argparse
import itertools
from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.distributed as dist

from recipes.experiments import tuning_seeds
from recipes.local_ranks import run_on_ranks
from recipes.qsr.comparison import Laboratory, Train
from recipes.qsr.ledger import Ledger, Tables
from recipes.qsr.real_ranks import train_on_ranks
from recipes.qsr.settings import Setting, Study
from recipes.qsr.simulated_ranks import train_simulated
from recipes.qsr.task import Task, open_task

Rows = list[dict[str, str]]


def run_studies(studies: Sequence[Study], arguments: argparse.Namespace, tables: Tables) -> None:
    """Run the studies of one part, as the flags say."""
    if not arguments.processes:
        # The models are small: a second thread would only wait.
        torch.set_num_threads(1)
        _run(studies, arguments, train_simulated, Ledger(tables, saves=True), _print)
        return
    for ranks, group in itertools.groupby(studies, key=lambda study: study.setting.ranks):
        rows = run_on_ranks(ranks, on_this_rank, tuple(group), arguments, tables)[0]
        # The ranks have copies of the tables, and rank 0 has saved its own.
        tables.runs.rows, tables.curves.rows = rows


def on_this_rank(
    studies: Sequence[Study], arguments: argparse.Namespace, tables: Tables
) -> tuple[Rows, Rows]:
    """Run studies as one rank of the default group; rank 0 prints and saves. Return the rows."""
    first = dist.get_rank() == 0
    ledger = Ledger(tables, saves=first)
    _run(studies, arguments, train_on_ranks, ledger, _print if first else _ignore)
    return tables.runs.rows, tables.curves.rows


def _run(
    studies: Sequence[Study],
    arguments: argparse.Namespace,
    train: Train,
    ledger: Ledger,
    report: Callable[[str], None],
) -> None:
    @cache
    def opened(dataset: str, label_noise: float) -> Task:
        return open_task(dataset, arguments.data, label_noise)

    def task_of(setting: Setting) -> Task:
        return opened(setting.dataset, setting.label_noise)

    tuning = tuning_seeds(arguments.seeds, arguments.grid.seeds)
    laboratory = Laboratory(train, ledger, task_of, arguments.grid, tuning, arguments.seeds, report)
    for study in studies:
        report(f"{study.setting}")
        laboratory.run(study)


def _print(text: str) -> None:
    # The parent's output is often a pipe, where lines would otherwise wait in the buffer.
    print(text, flush=True)


def _ignore(text: str) -> None:
    pass
