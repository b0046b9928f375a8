"""Bytes of one selection that all ranks share, compared with a separate selection per rank.

    python -m recipes.jointspar.selection

Takes seconds. An all-reduce carries every layer that at least one rank keeps. JointSpar's own
sampling draws the layers of ResNet-18 (21 layers), with the same p for all layers and ranks. The
bytes are those of a ring all-reduce. Writes ``selection.csv`` and ``selection.png``.
"""

import argparse
import itertools
import sys
from pathlib import Path

import numpy as np

from recipes.errors import exit_on_user_error
from recipes.experiments import ResultTable
from recipes.jointspar.parts import parse_common
from recipes.result_files import make_folder, pyplot, read_csv, save_figure
from recipes.spread import Spread, spread
from torchcomp.advisor.torchvision_compat import import_torchvision
from torchcomp.jointspar import default_layers, sample
from torchcomp.keys import Key
from torchcomp.traffic import sum_bytes

RANKS = (2, 4, 8, 16, 32, 64)
BUDGETS = (0.3, 0.6)
STEPS = 200
QUICK_STEPS = 10
# Both kinds of selection, with their lines in the picture.
KINDS = {"per_rank": "o-", "shared": "s--"}
COLUMNS = ("budget", "ranks", "seed", "union_of_layers", "per_rank_bytes", "shared_bytes")


@exit_on_user_error()
def main() -> None:
    """Measure the missing rows, print the table, and draw the picture."""
    arguments = parse(sys.argv[1:])
    table = open_table(arguments)
    make_folder(arguments.out)
    finished = {(float(row["budget"]), int(row["ranks"]), int(row["seed"])) for row in table.rows}
    sizes = layer_bytes()
    for run in itertools.product(BUDGETS, RANKS, arguments.seeds):
        if run not in finished:
            numbers = measure(sizes, *run, steps_of(arguments))
            table.add([*run, *(f"{number:.4g}" for number in numbers)])
    for (budget, ranks), shares in summary(table.path).items():
        sent = ", ".join(f"{name} {share.mean:.1%}" for name, share in shares.items())
        print(f"budget {budget:.0%}, {ranks} ranks: {sent} of the bytes")
    draw(table.path, arguments.out / "selection.png")


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    return parse_common(__doc__, words)


def steps_of(arguments: argparse.Namespace) -> int:
    """Return the number of draws for each row."""
    return QUICK_STEPS if arguments.quick else STEPS


def open_table(arguments: argparse.Namespace) -> ResultTable:
    """Open the table, with the finished rows if the experiment is resumed."""
    task = f"ResNet-18, {steps_of(arguments)} draws"
    return ResultTable(arguments.out / "selection.csv", COLUMNS, task, resume=arguments.resume)


def layer_bytes() -> np.ndarray:
    """Return the bytes of each layer of torchvision's ResNet-18 with ten classes."""
    model = import_torchvision().models.resnet18(num_classes=10)
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


def summary(table: Path) -> dict[tuple[float, int], dict[str, Spread]]:
    """Return the bytes of both selections over the seeds, by budget and number of ranks."""
    found: dict[tuple[float, int], dict[str, list[float]]] = {}
    for row in read_csv(table):
        shares = found.setdefault((float(row["budget"]), int(row["ranks"])), {})
        for kind in KINDS:
            shares.setdefault(kind, []).append(float(row[f"{kind}_bytes"]))
    return {
        key: {kind: spread(values) for kind, values in shares.items()}
        for key, shares in found.items()
    }


def draw(table: Path, path: Path) -> None:
    """Draw the bytes of both selections against the number of ranks."""
    shares = summary(table)
    figure, axes = pyplot().subplots(figsize=(8, 4.8), layout="constrained")
    for index, budget in enumerate(BUDGETS):
        for kind, style in KINDS.items():
            percent = [100 * shares[budget, ranks][kind].mean for ranks in RANKS]
            label = f'selection="{kind.replace("_", "-")}", budget={budget}'
            axes.plot(RANKS, percent, style, color=f"C{index}", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(RANKS, [str(n) for n in RANKS])
    axes.set_ylim(0, 105)
    axes.set_xlabel("ranks")
    axes.set_ylabel("bytes that a rank sends per step, % of dense DDP's")
    last = shares[BUDGETS[0], RANKS[-1]]
    ratio = last["per_rank"].mean / last["shared"].mean
    axes.set_title(
        f"JointSpar, ResNet-18, budget {BUDGETS[0]:.0%}, {RANKS[-1]} ranks:\n"
        f"a shared selection sends {ratio:.1f}x fewer bytes than one per rank",
        fontsize=11,
    )
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize=8)
    save_figure(figure, path)


if __name__ == "__main__":
    main()
