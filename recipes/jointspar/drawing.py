"""The pictures of the training runs."""

import json
from pathlib import Path
from typing import Any

from recipes.jointspar.layer_training import Method
from recipes.jointspar.run_table import Summary
from recipes.result_files import pyplot, read_csv, save_figure

_MARKERS = "osDv^P*X"
_NAMES = {
    "dense": "dense LARS",
    "jointspar": "JointSpar-LARS",
    "uniform": "uniform dropping",
    "topk": "ef(topk)",
    "jointspar+topk": "JointSpar-LARS + ef(topk)",
}


def draw_accuracy(rows: list[Summary], path: Path) -> None:
    """Draw test accuracy against the share of bytes sent, with the deviation over the seeds."""
    figure, axes = pyplot().subplots(figsize=(9, 5.4), layout="constrained")
    names = dict.fromkeys(_name(row.method) for row in rows if row.method.kind != "dense")
    dense = next(row for row in rows if row.method.kind == "dense")
    axes.axhspan(dense.mean - dense.deviation, dense.mean + dense.deviation, color="0.9")
    axes.axhline(dense.mean, color="black", linewidth=1, label="dense LARS, ± 1 deviation")
    for name, marker in zip(names, _MARKERS, strict=False):
        # Sorted by bytes, so that the line does not turn back.
        group = sorted(
            (row for row in rows if _name(row.method) == name), key=lambda row: row.bytes_share
        )
        axes.errorbar(
            [100 * row.bytes_share for row in group],
            [row.mean for row in group],
            [row.deviation for row in group],
            fmt=marker + "-",
            capsize=4,
            label=name,
        )
    axes.set_ylim(bottom=min(row.mean for row in rows) - 2, top=100)
    axes.set_xlim(left=0)
    axes.set_xlabel("bytes sent, % of dense DDP's")
    axes.set_ylabel(f"test accuracy, % (mean and deviation, {len(dense.tests)} seeds)")
    axes.set_title(_accuracy_title(rows, dense), fontsize=11)
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    save_figure(figure, path)


def _accuracy_title(rows: list[Summary], dense: Summary) -> str:
    close = [row for row in rows if row.mean >= dense.mean - dense.deviation]
    savings = []
    for kind in ("jointspar", "topk"):
        shares = [row.bytes_share for row in close if row.method == Method(kind, row.method.budget)]
        if shares:
            savings.append(f"{_NAMES[kind]} {1 / min(shares):.1f}x fewer bytes")
    return f"Accuracy within one deviation of dense LARS: {', '.join(savings) or 'no method'}"


def draw_wall_clock(table: Path, path: Path) -> None:
    """Draw test accuracy against the seconds of a whole run on the shaped network.

    Args:
        table: ``wall_clock.csv``.
        path: path of the picture.
    """
    rows = read_csv(table)
    figure, axes = pyplot().subplots(figsize=(11, 6), layout="constrained")
    # Budgets are marker shapes, because texts next to the points would overlap.
    budgets = sorted({_budget(row) for row in rows})
    markers = dict(zip(budgets, _MARKERS, strict=False))
    for index, name in enumerate(dict.fromkeys(_name(_method(row)) for row in rows)):
        group = [row for row in rows if _name(_method(row)) == name]
        _draw_group(axes, sorted(group, key=_budget), markers, f"C{index}")
    for budget, marker in markers.items():
        axes.plot([], [], marker, color="0.4", label=f"budget {budget:.0%}")
    axes.set_ylim(bottom=min(float(row["accuracy"]) for row in rows) - 2, top=100)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"seconds of a run, two hosts at {rows[0]['mbit']} Mbit/s")
    axes.set_ylabel("test accuracy, % (mean and deviation over the seeds)")
    axes.set_title(_wall_clock_title(rows), fontsize=11)
    axes.grid(True, alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    save_figure(figure, path)


def _wall_clock_title(rows: list[dict[str, str]]) -> str:
    dense = next((row for row in rows if row["kind"] == "dense"), None)
    if dense is None:
        return "Accuracy against time"
    least = float(dense["accuracy"]) - float(dense["deviation"])
    speedups = []
    for kind in ("jointspar", "topk"):
        seconds = [
            float(row["seconds"])
            for row in rows
            if _method(row) == Method(kind, _budget(row)) and float(row["accuracy"]) >= least
        ]
        if seconds:
            speedups.append(f"{_NAMES[kind]} {float(dense['seconds']) / min(seconds):.2f}x faster")
    return f"Accuracy within one deviation of dense LARS: {', '.join(speedups) or 'no method'}"


def _draw_group(
    axes: Any, rows: list[dict[str, str]], markers: dict[float, str], color: str
) -> None:
    """Draw a method's points, joined in the order of their budgets."""
    seconds, means = ([float(row[column]) for row in rows] for column in ("seconds", "accuracy"))
    axes.plot(seconds, means, color=color, linewidth=1.2, label=_name(_method(rows[0])))
    for row, x, y in zip(rows, seconds, means, strict=True):
        deviation = float(row["deviation"])
        axes.errorbar(x, y, deviation, fmt=markers[_budget(row)], color=color, capsize=4)


def _name(method: Method) -> str:
    return _NAMES[method.kind] + ("" if method.norm == "running" else ", own norm")


def _method(row: dict[str, str]) -> Method:
    return Method(row["kind"], _budget(row), row["norm"])


def _budget(row: dict[str, str]) -> float:
    return float(row["budget"])


def draw_probabilities(metrics: Path, path: Path) -> None:
    """Draw a heat map of the probabilities of all layers over time, and the kept layers.

    Args:
        metrics: lines of :meth:`torchcomp.jointspar.JointSparStats.row`, one per step.
        path: path of the picture.
    """
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    layers = list(rows[0]["p"])
    p = [[row["p"][layer] for row in rows] for layer in layers]
    kept = [[layer in row["kept"] for row in rows] for layer in layers]
    height = 1.6 + 0.2 * len(layers)
    figure, axes = pyplot().subplots(1, 2, figsize=(13, height), layout="constrained", sharey=True)
    options = {"aspect": "auto", "interpolation": "nearest", "vmin": 0, "vmax": 1}
    image = axes[0].imshow(p, cmap="viridis", **options)
    # Above the bar: next to it, the name would seem to belong to the other panel.
    figure.colorbar(image, ax=axes[0]).ax.set_title("p", fontsize=10)
    axes[1].imshow(kept, cmap="Greys", **options)
    for each, title in zip(axes, ("probability p of each layer", "kept (black)"), strict=True):
        each.set_title(title, fontsize=10)
        each.set_xlabel("step")
    axes[0].set_yticks(range(len(layers)), layers, fontsize=8)
    axes[0].set_ylabel("layer, from the input down to the output")
    figure.suptitle(_probabilities_title(rows))
    save_figure(figure, path)


def _probabilities_title(rows: list[dict[str, Any]]) -> str:
    kept = sum(len(row["kept"]) for row in rows) / (len(rows) * len(rows[0]["p"]))
    last = rows[-1]["p"]
    title = (
        f"JointSpar keeps {kept:.0%} of the layers over {len(rows)} steps; final p from "
        f"{min(last.values()):.2f} to {max(last.values()):.2f}"
    )
    sent, dense = (rows[-1].get(name) for name in ("total_bytes_sent", "total_dense_bytes_sent"))
    return f"{title}; {dense / sent:.1f}x fewer bytes than dense" if sent and dense else title
