"""Bytes of one selection that all ranks share, compared with a separate selection per rank.

An all-reduce carries every layer that at least one rank keeps. JointSpar's own sampling draws the
layers of ResNet-18 (21 layers), with the same p for all layers and ranks. The bytes are those of a
ring all-reduce.
"""

import argparse
import itertools
import sys
from collections.abc import Callable

import numpy as np
import torch

from recipes.experiments import ResultTable, fill
from recipes.models import build_model
from torchcomp.jointspar import default_layers, sample
from torchcomp.keys import Key
from torchcomp.traffic import sum_bytes

RANKS = (2, 4, 8, 16, 32, 64)
BUDGETS = (0.3, 0.6)
STEPS, QUICK_STEPS = 200, 10


def open_selection(arguments: argparse.Namespace) -> Callable[[], None]:
    """Return what measures the missing rows."""
    steps = QUICK_STEPS if arguments.quick else STEPS
    table = ResultTable(
        arguments.out / "selection.csv",
        ("budget", "ranks", "seed"),
        ("union_of_layers", "per_rank_bytes", "shared_bytes"),
        f"ResNet-18, {steps} draws",
        resume=arguments.resume,
    )
    runs = list(itertools.product(BUDGETS, RANKS, arguments.seeds))
    sizes = layer_bytes()

    def cells(run: tuple[float, int, int]) -> list[str]:
        return [f"{number:.4g}" for number in measure(sizes, *run, steps)]

    return lambda: fill(table, runs, cells)


def layer_bytes() -> np.ndarray:
    """Return the bytes of each layer of torchvision's ResNet-18 with ten classes."""
    with torch.device("meta"):
        model = build_model("torchvision/resnet18", channels=3, classes=10, small_stem=False)
    parameters = dict(model.named_parameters())
    layers = default_layers(parameters.items())
    return np.array([sum(parameters[n].nbytes for n in names) for names in layers.values()])


def measure(
    sizes: np.ndarray, budget: float, ranks: int, seed: int, steps: int = STEPS
) -> tuple[float, float, float]:
    """Return the union's share of the layers, and both selections' shares of dense bytes."""
    p = np.full(len(sizes), budget)
    unions, per_rank, shared = [], [], []
    for step in range(steps):
        keys = [Key(seed, step, rank=rank) for rank in range(ranks)]
        union = np.any([sample(p, key, shared=False) for key in keys], axis=0)
        unions.append(union.mean())
        per_rank.append(sum_bytes(int(sizes[union].sum()), ranks))
        shared.append(sum_bytes(int(sizes[sample(p, keys[0])].sum()), ranks))
    dense = sum_bytes(int(sizes.sum()), ranks)
    return float(np.mean(unions)), float(np.mean(per_rank)) / dense, float(np.mean(shared)) / dense


if __name__ == "__main__":
    from recipes.jointspar.experiment import main

    main(["--only", "selection", *sys.argv[1:]])
