"""The plots of the experiments."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

# The recipes are scripts: they import their neighbours as modules beside them.
sys.path.append(str(Path(__file__).resolve().parents[1] / "bidirectional_topk"))

from result_files import pyplot
from run_table import Summary

_MARKS = "osDv^P*X"


def save(figure: Any, path: Path) -> None:
    """Write a figure and forget it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot().close(figure)


def draw_accuracy(rows: list[Summary], path: Path) -> None:
    """Test accuracy against the share of bytes sent, with the deviation over the seeds."""
    figure, axes = pyplot().subplots(figsize=(8, 5), layout="constrained")
    families = dict.fromkeys(row.method.family for row in rows if row.method.kind != "dense")
    dense = next(row for row in rows if row.method.kind == "dense")
    axes.axhspan(dense.mean - dense.deviation, dense.mean + dense.deviation, color="0.9")
    axes.axhline(dense.mean, color="black", linewidth=1, label="dense LARS, ± 1 deviation")
    for family, mark in zip(families, _MARKS, strict=False):
        held = [row for row in rows if row.method.family == family]
        axes.errorbar(
            [100 * row.bytes_share for row in held],
            [row.mean for row in held],
            [row.deviation for row in held],
            fmt=mark + "-",
            capsize=4,
            label=family,
        )
    axes.set_ylim(bottom=min(row.mean for row in rows) - 2, top=100)
    axes.set_xlim(left=0)
    axes.set_xlabel("bytes sent, % of dense DDP's")
    axes.set_ylabel("test accuracy, %")
    axes.set_title(f"Mean and deviation over {len(dense.tests)} seeds, best of the rates")
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, path)


def draw_wall_clock(table: Path, path: Path) -> None:
    """Test accuracy against the seconds of a whole run on the shaped network.

    Args:
        table: ``wall_clock.csv``.
        path: of the picture.
    """
    with table.open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    figure, axes = pyplot().subplots(figsize=(9, 5), layout="constrained")
    families = dict.fromkeys((row["kind"], row["norm"]) for row in rows)
    for family, mark in zip(families, _MARKS, strict=False):
        held = [row for row in rows if (row["kind"], row["norm"]) == family]
        seconds, means, deviations = (
            [float(row[column]) for row in held] for column in ("seconds", "accuracy", "deviation")
        )
        label = family[0] if family[1] == "running" else f"{family[0]}, own norm"
        axes.errorbar(seconds, means, deviations, fmt=mark, capsize=4, label=label)
        if family[0] == "uniform" or family[1] == "own":
            # Beside the methods that they are variants of; their labels would cover those.
            continue
        for row, at in zip(held, zip(seconds, means, strict=True), strict=True):
            text = f"{float(row['budget']):.0%}"
            axes.annotate(text, at, (4, 6), textcoords="offset points", fontsize=8)
    axes.set_ylim(bottom=min(float(row["accuracy"]) for row in rows) - 2, top=100)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"seconds of a run, two hosts at {rows[0]['mbit']} Mbit/s")
    axes.set_ylabel("test accuracy, % (mean and deviation over the seeds)")
    axes.grid(True, alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    save(figure, path)


def draw_probabilities(metrics: Path, path: Path) -> None:
    """A heat map of the probabilities of all layers over time, and what was kept of them.

    Args:
        metrics: lines of :meth:`torchcomp.jointspar.JointSparStats.row`, one a step.
        path: of the picture.
    """
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    layers = list(rows[0]["p"])
    p = [[row["p"][layer] for row in rows] for layer in layers]
    kept = [[layer in row["kept"] for row in rows] for layer in layers]
    height = 1.2 + 0.2 * len(layers)
    figure, axes = pyplot().subplots(1, 2, figsize=(13, height), layout="constrained", sharey=True)
    options = {"aspect": "auto", "interpolation": "nearest", "vmin": 0, "vmax": 1}
    image = axes[0].imshow(p, cmap="viridis", **options)
    figure.colorbar(image, ax=axes[0], label="p")
    axes[1].imshow(kept, cmap="Greys", **options)
    for each, title in zip(axes, ("Probability of each layer", "Kept (black)"), strict=True):
        each.set_title(title)
        each.set_xlabel("step")
    axes[0].set_yticks(range(len(layers)), layers, fontsize=8)
    axes[0].set_ylabel("layer, from the input down to the output")
    save(figure, path)
