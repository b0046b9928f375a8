"""The plots of the experiments."""

import json
from pathlib import Path
from typing import Any

from recipes.jointspar.layer_training import Method
from recipes.jointspar.run_table import Summary
from recipes.result_files import pyplot, read_csv, save_figure

_MARKS = "osDv^P*X"


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
    save_figure(figure, path)


def draw_wall_clock(table: Path, path: Path) -> None:
    """Test accuracy against the seconds of a whole run on the shaped network.

    Args:
        table: ``wall_clock.csv``.
        path: of the picture.
    """
    rows = read_csv(table)
    figure, axes = pyplot().subplots(figsize=(10, 6), layout="constrained")
    # Budgets as shapes: written beside the points, they would cover one another.
    budgets = sorted({_budget(row) for row in rows})
    marks = dict(zip(budgets, _MARKS, strict=False))
    for place, family in enumerate(dict.fromkeys(_family(row) for row in rows)):
        held = [row for row in rows if _family(row) == family]
        _draw_family(axes, sorted(held, key=_budget), marks, f"C{place}")
    for budget, mark in marks.items():
        axes.plot([], [], mark, color="0.4", label=f"budget {budget:.0%}")
    axes.set_ylim(bottom=min(float(row["accuracy"]) for row in rows) - 2, top=100)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"seconds of a run, two hosts at {rows[0]['mbit']} Mbit/s")
    axes.set_ylabel("test accuracy, % (mean and deviation over the seeds)")
    axes.grid(True, alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    save_figure(figure, path)


def _draw_family(
    axes: Any, rows: list[dict[str, str]], marks: dict[float, str], colour: str
) -> None:
    """Draw a method's points, joined in the order of their budgets."""
    seconds, means = ([float(row[column]) for row in rows] for column in ("seconds", "accuracy"))
    axes.plot(seconds, means, color=colour, linewidth=1.2, label=_family(rows[0]))
    for row, x, y in zip(rows, seconds, means, strict=True):
        deviation = float(row["deviation"])
        axes.errorbar(x, y, deviation, fmt=marks[_budget(row)], color=colour, capsize=4)


def _family(row: dict[str, str]) -> str:
    return Method(row["kind"], _budget(row), row["norm"]).family


def _budget(row: dict[str, str]) -> float:
    return float(row["budget"])


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
    # Above the bar: beside it, the name would be the other panel's.
    figure.colorbar(image, ax=axes[0]).ax.set_title("p", fontsize=10)
    axes[1].imshow(kept, cmap="Greys", **options)
    for each, title in zip(axes, ("Probability of each layer", "Kept (black)"), strict=True):
        each.set_title(title)
        each.set_xlabel("step")
    axes[0].set_yticks(range(len(layers)), layers, fontsize=8)
    axes[0].set_ylabel("layer, from the input down to the output")
    save_figure(figure, path)
