"""Bytes of a selection that all ranks share, and of one that every rank draws for itself.

    python -m recipes.jointspar.selection     # seconds

An all-reduce carries every layer that any rank keeps. The sets are drawn by JointSpar's own
sampling, for ResNet-18 (21 layers) with the same p on all ranks; bytes are those of a ring
all-reduce over all ranks. Writes ``selection.csv`` and ``selection.png``.
"""

import argparse
from pathlib import Path

import numpy as np

from recipes.errors import told_in_one_line
from recipes.result_files import make_folder, pyplot, save_figure, write_csv
from recipes.torchvision_compat import import_torchvision
from torchcomp.jointspar import default_layers, sample
from torchcomp.keys import Key
from torchcomp.traffic import sum_bytes

RANKS = (2, 4, 8, 16, 32, 64)
BUDGETS = (0.3, 0.6)
STEPS = 200


def layer_bytes() -> np.ndarray:
    """Bytes of each layer of torchvision's ResNet-18 with ten classes."""
    model = import_torchvision().models.resnet18(num_classes=10)
    parameters = dict(model.named_parameters())
    layers = default_layers(parameters.items())
    return np.array([sum(parameters[n].nbytes for n in names) for names in layers.values()])


def measure(sizes: np.ndarray, budget: float, ranks: int) -> tuple[float, float, float]:
    """Share of the layers in the union, and shares of dense bytes: per-rank and shared."""
    p = np.full(len(sizes), budget)
    unions, own, shared = [], [], []
    for step in range(STEPS):
        keys = [Key(0, step, rank=rank) for rank in range(ranks)]
        union = np.any([sample(p, key, shared=False) for key in keys], axis=0)
        unions.append(union.mean())
        own.append(sum_bytes(int(sizes[union].sum()), ranks))
        shared.append(sum_bytes(int(sizes[sample(p, keys[0])].sum()), ranks))
    dense = sum_bytes(int(sizes.sum()), ranks)
    return float(np.mean(unions)), float(np.mean(own)) / dense, float(np.mean(shared)) / dense


@told_in_one_line()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    folder = Path(__file__).resolve().parent / "results"
    parser.add_argument("--out", type=Path, default=folder, help="folder of the files [results]")
    out = parser.parse_args().out
    make_folder(out)
    sizes = layer_bytes()
    rows = [(b, n, *measure(sizes, b, n)) for b in BUDGETS for n in RANKS]
    header = ["budget", "ranks", "union_of_layers", "per_rank_bytes", "shared_bytes"]
    print("  ".join(f"{cell:>16}" for cell in header))
    for row in rows:
        print("  ".join(f"{cell:>16.3f}" for cell in row))
    write_csv(out / "selection.csv", header, [[f"{cell:.4g}" for cell in row] for row in rows])
    draw(rows, out / "selection.png")


def draw(rows: list[tuple[float, ...]], path: Path) -> None:
    figure, axes = pyplot().subplots(figsize=(7, 4.5), layout="constrained")
    for place, budget in enumerate(BUDGETS):
        held = [row for row in rows if row[0] == budget]
        ranks = [row[1] for row in held]
        per_rank, shared = ([100 * row[column] for row in held] for column in (3, 4))
        axes.plot(ranks, per_rank, "o-", color=f"C{place}", label=f"per rank, budget {budget:.0%}")
        axes.plot(ranks, shared, "s--", color=f"C{place}", label=f"shared, budget {budget:.0%}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(RANKS, [str(n) for n in RANKS])
    axes.set_ylim(0, 105)
    axes.set_xlabel("ranks")
    axes.set_ylabel("bytes that a rank sends, % of dense DDP's")
    axes.set_title("ResNet-18: what an all-reduce of the kept layers carries")
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize=8)
    save_figure(figure, path)


if __name__ == "__main__":
    main()
