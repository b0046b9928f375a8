"""Loss and bytes of the three modes, for several methods and seeds.

    python -m recipes.nodes.experiment               # 200 steps, 2 nodes of 2 ranks, 5 seeds
    python -m recipes.nodes.experiment --quick
    python -m recipes.nodes.experiment --resume

Ranks are processes over gloo, on this machine. The file in ``--out`` is ``runs.csv`` (every run,
saved as it ends).
"""

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from recipes.errors import exit_on_user_error
from recipes.experiments import ExperimentParser, ResultTable, fill_on_ranks
from recipes.nodes.modes import MODES
from recipes.nodes.tables import losses
from recipes.nodes.train import Outcome, Settings, open_corpus, train
from recipes.result_files import make_folder
from recipes.rows import columns

_HERE = Path(__file__).resolve().parent
RUN = ("mode", "compress", "seed")
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
    steps = QUICK_STEPS if arguments.quick else Settings.steps
    nodes = RANKS // Settings.ranks_per_node
    task = (
        f"{nodes} nodes of {Settings.ranks_per_node} ranks, {steps} steps, batch "
        f"{Settings.batch}, peak lr {Settings.lr:g}, {open_corpus().name}"
    )
    path = arguments.out / "runs.csv"
    table = ResultTable(path, RUN, columns(Outcome), task, resume=arguments.resume)
    make_folder(arguments.out)
    runs = [
        (mode, method, seed) for seed in arguments.seeds for method in METHODS for mode in MODES
    ]
    fill_on_ranks(RANKS, table, runs, partial(train_once, steps=steps))
    print(f"\n{losses(arguments.out)}\n\nthe table is in {table.path}")


def parse(words: list[str]) -> argparse.Namespace:
    parser = ExperimentParser(__doc__, _HERE, quick_seeds=(0,))
    parsed = parser.read(words)
    parsed.out = parser.output_folder(parsed)
    return parsed


def train_once(run: tuple[str, str, int], steps: int) -> Outcome:
    mode, compress, seed = run
    settings = Settings(mode=mode, compress=compress, seed=seed, steps=steps, device="cpu")
    outcome = train(settings, torch.device("cpu"))
    return replace(outcome, loss=round(outcome.loss, 4))


if __name__ == "__main__":
    main()
