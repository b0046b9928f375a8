"""Loss and bytes of the three modes, for several methods and seeds.

    python -m recipes.nodes.experiment               # 200 steps, 2 nodes of 2 ranks, 5 seeds
    python -m recipes.nodes.experiment --quick
    python -m recipes.nodes.experiment --resume

Ranks are processes over gloo, on this machine. The file in ``--out`` is ``runs.csv`` (every run,
saved as it ends).
"""

import argparse
import sys
from dataclasses import astuple
from pathlib import Path

import torch
import torch.distributed as dist

from recipes.errors import exit_on_user_error
from recipes.experiments import ExperimentParser, ResultTable
from recipes.local_ranks import run_on_ranks
from recipes.nodes.corpus import open_corpus
from recipes.nodes.modes import MODES
from recipes.nodes.settings import Settings
from recipes.nodes.tables import losses
from recipes.nodes.train import train
from recipes.result_files import make_folder

_HERE = Path(__file__).resolve().parent
COLUMNS = ("mode", "compress", "seed", "loss", "between", "inside", "residual")
RANKS, QUICK_STEPS = 4, 10
METHODS = (
    "mean",
    "ef(topk(0.1))",
    'ef(topk(0.1, scope="tensor"))',
    'bidirectional(quantize("int4"), quantize("int4"))',
)


@exit_on_user_error()
def main() -> None:
    """Train in every mode with every method and seed, and print the means."""
    arguments = parse(sys.argv[1:])
    runs = settings_of(arguments)
    table = ResultTable(arguments.out / "runs.csv", COLUMNS, task(runs[0]), resume=arguments.resume)
    make_folder(arguments.out)
    rows = run_on_ranks(RANKS, on_this_rank, missing(runs, table), table)[0]
    print(f"\n{losses(rows)}\n\nthe table is in {table.path}")


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = ExperimentParser(__doc__.splitlines()[0], _HERE, quick_seeds=(0,))
    parsed = parser.read(words)
    parsed.out = parser.output_folder(parsed)
    return parsed


def settings_of(arguments: argparse.Namespace) -> list[Settings]:
    """Return the settings of all runs, seed by seed."""
    steps = QUICK_STEPS if arguments.quick else Settings.steps
    return [
        Settings(mode=mode, compress=method, seed=seed, steps=steps, device="cpu")
        for seed in arguments.seeds
        for method in METHODS
        for mode in MODES
    ]


def task(settings: Settings) -> str:
    """Return the settings that all rows of a table share."""
    nodes = RANKS // settings.ranks_per_node
    return (
        f"{nodes} nodes of {settings.ranks_per_node} ranks, {settings.steps} steps, batch "
        f"{settings.batch}, peak lr {settings.lr:g}, {open_corpus().name}"
    )


def missing(runs: list[Settings], table: ResultTable) -> list[Settings]:
    """Return the runs that the table lacks."""
    finished = {(row["mode"], row["compress"], row["seed"]) for row in table.rows}
    return [run for run in runs if (run.mode, run.compress, str(run.seed)) not in finished]


def on_this_rank(runs: list[Settings], table: ResultTable) -> list[dict[str, str]]:
    """Train as one rank of the default group. Rank 0 saves."""
    for run in runs:
        loss, *counts = astuple(train(run, torch.device(run.device)))
        if dist.get_rank() == 0:
            table.add((run.mode, run.compress, run.seed, f"{loss:.4f}", *counts))
    return table.rows


if __name__ == "__main__":
    main()
