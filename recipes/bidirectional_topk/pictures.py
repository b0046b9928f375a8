"""The pictures of the three parts, drawn from their CSV files."""

from itertools import pairwise
from pathlib import Path
from typing import Any

from recipes.bidirectional_topk import counterexample
from recipes.bidirectional_topk.downlink import (
    PUBLISHED,
    Downlink,
    by_model,
    random_union,
    saving_line,
)
from recipes.result_files import pyplot, read_csv, save_figure

_MARKERS = {"mlp": "o", "cnn": "s"}


def draw_counterexample(folder: Path) -> None:
    """Draw F - F* against t at the thesis's learning rate, and its late mean against the lr."""
    rows = read_csv(folder / counterexample.TABLE)
    curves = read_csv(folder / counterexample.CURVES)
    gaps = counterexample.late_gaps(rows)
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(11, 4.8), layout="constrained")
    figure.suptitle(_counterexample_title(gaps[counterexample.LR]))
    _draw_curves(left, curves)
    _draw_scan(right, gaps)
    for axes in (left, right):
        axes.set_yscale("log")
        axes.grid(True, alpha=0.3)
        axes.legend()
    save_figure(figure, folder / "counterexample.png")


def _counterexample_title(gaps: dict[str, float]) -> str:
    ratio = gaps["unidirectional"] / gaps["bidirectional"]
    order = f"{ratio:.2f}x closer to" if ratio >= 1 else f"{1 / ratio:.2f}x farther from"
    return (
        f"Counterexample at lr {counterexample.LR:g}: bidirectional TopK stays {order} the minimum "
        "than unidirectional"
    )


def _draw_curves(axes: Any, curves: list[dict[str, str]]) -> None:
    for index, method in enumerate(counterexample.METHODS):
        # Below 0.001 there is only rounding, which a log axis would show as noise.
        gaps = [max(float(row[method]) - counterexample.MINIMUM, 1e-3) for row in curves]
        axes.plot(gaps, color=f"C{index}", linewidth=1.5, label=method)
    axes.set_xlabel("step t")
    axes.set_ylabel("F(w) − F*   (cut off at 0.001)")
    axes.set_title(f"3 ranks, one entry of {counterexample.DIMENSIONS} kept", fontsize=10)


def _draw_scan(axes: Any, gaps: dict[float, dict[str, float]]) -> None:
    lrs = sorted(gaps)
    for index, (method, marker) in enumerate(zip(counterexample.SCANNED, "os", strict=True)):
        heights = [gaps[lr][method] for lr in lrs]
        axes.plot(lrs, heights, marker + "-", color=f"C{index}", label=method)
    axes.axvline(counterexample.LR, color="grey", linestyle=":", linewidth=1)
    axes.set_xlabel("learning rate (dotted: the thesis's)")
    first, last = counterexample.LATE_FROM, counterexample.STEPS
    axes.set_ylabel(f"mean of F(w) − F* over t in [{first}, {last})")
    lower = [min(gaps[lr], key=gaps[lr].__getitem__) for lr in lrs]
    changes = sum(before != after for before, after in pairwise(lower))
    axes.set_title(f"The order changes {changes} times over {len(lrs)} learning rates", fontsize=10)


def draw_downlink(folder: Path) -> None:
    """Draw unions, savings and counted bytes against the number of workers."""
    rows = [Downlink.of(row) for row in read_csv(folder / "downlink.csv")]
    figure, axes = pyplot().subplots(1, 3, figsize=(15, 5.2), layout="constrained")
    figure.suptitle(_downlink_title(rows))
    _draw_unions(axes[0], rows)
    _draw_savings(axes[1], rows)
    _draw_bytes(axes[2], rows)
    for each in axes:
        each.set_xlabel("workers N")
        each.grid(True, alpha=0.3)
        each.legend(fontsize=7)
    save_figure(figure, folder / "downlink.png")


def _downlink_title(rows: list[Downlink]) -> str:
    most = max(row.workers for row in rows)
    savings = [row.saving for row in rows if row.workers == most and row.method == "bidirectional"]
    return (
        f"Bidirectional TopK: {min(savings):.1f}x to {max(savings):.1f}x fewer bytes from a server "
        f"to each of {most} workers than unidirectional ({rows[0].dataset}, K = 0.001 d)"
    )


def _draw_unions(axes: Any, rows: list[Downlink]) -> None:
    counts = sorted({row.workers for row in rows})
    # The unidirectional curves would cover these; the table has both.
    for index, (name, group) in enumerate(by_model(rows, "bidirectional").items()):
        n, union = [row.workers for row in group], [row.union for row in group]
        axes.plot(n, union, _MARKERS[group[0].model] + "-", color=f"C{index}", label=name)
    d, k = rows[0].d, rows[0].k
    grid = range(1, counts[-1] + 1)
    random = [random_union(d, k, n) for n in grid]
    axes.plot(grid, random, ":", color="black", label="random supports")
    shown = {n: union for n, union in PUBLISHED.items() if n <= counts[-1]}
    if shown:
        axes.plot(list(shown), list(shown.values()), "k*", markersize=10, label="thesis")
    axes.set_ylabel("union of supports, in units of K")
    axes.set_title("Entries of an uncompressed downlink", fontsize=10)


def _draw_savings(axes: Any, rows: list[Downlink]) -> None:
    for index, (name, group) in enumerate(by_model(rows, "bidirectional").items()):
        n = [row.workers for row in group]
        slope, intercept, fit = saving_line(group)
        marker = _MARKERS[group[0].model]
        axes.plot(n, [row.saving for row in group], marker, color=f"C{index}")
        label = f"{name}: {intercept:.2f} + {slope:.3f} N, R² = {fit:.3f}"
        ends = [0, n[-1]]
        axes.plot(ends, [intercept + slope * x for x in ends], color=f"C{index}", label=label)
    axes.set_ylabel("bytes of the union / bytes of K entries")
    axes.set_title("Saving on the downlink of a server", fontsize=10)


def _draw_bytes(axes: Any, rows: list[Downlink]) -> None:
    *_, group = by_model(rows, "bidirectional").values()
    n = [row.workers for row in group]
    columns = {
        "bidirectional: downlink messages": [row.down for row in group],
        "bidirectional: uplink and downlink messages": [row.down + row.up for row in group],
        "bidirectional: all, with control": [row.down + row.up + row.control for row in group],
        'bidirectional, selection="shard": all': [row.by_shard for row in group],
        "bidirectional: uplink of the busiest rank": [row.up_most for row in group],
        "unidirectional by all-gather": [row.gather for row in group],
        "unidirectional, sharded": [row.sharded for row in group],
    }
    for (label, heights), marker in zip(columns.items(), "osDPx^v", strict=True):
        axes.plot(n, heights, marker + "-", label=label)
    axes.set_yscale("log")
    # Leave room for the legend above the curves.
    axes.set_ylim(top=30 * max(columns["unidirectional, sharded"]))
    axes.set_ylabel("bytes that a rank receives per step (log)")
    first = group[0]
    axes.set_title(
        f"Without a server: {first.model}, {first.phase}, d = {first.d:,}, K = {first.k}",
        fontsize=10,
    )


def draw_accuracy(folder: Path) -> None:
    """Draw every seed's test accuracy, and mean and deviation, by model and method."""
    rows = read_csv(folder / "accuracy.csv")
    figure, axes = pyplot().subplots(figsize=(9, 4.8), layout="constrained")
    for index, row in enumerate(rows):
        mean, deviation = float(row["mean"]), float(row["deviation"])
        accuracies = [float(text) for text in row["by_seed"].split()]
        axes.plot([index] * len(accuracies), accuracies, ".", color="grey")
        axes.errorbar(index, mean, deviation, fmt="o", color="C0", capsize=6)
        axes.annotate(
            f"{mean:.2f} ± {deviation:.2f}\nlr {float(row['lr']):g}",
            (index, mean),
            xytext=(8, 0),
            textcoords="offset points",
            verticalalignment="center",
            fontsize=8,
        )
    labels = [f"{row['model']}\n{row['method']}" for row in rows]
    axes.set_xticks(range(len(rows)), labels, fontsize=8)
    axes.set_xlim(-0.5, len(rows) - 0.1)
    axes.set_ylabel("test accuracy, %   (mean and deviation; grey: each seed)")
    axes.set_title(_accuracy_title(rows), fontsize=10)
    axes.grid(True, axis="y", alpha=0.3)
    save_figure(figure, folder / "accuracy.png")


def _accuracy_title(rows: list[dict[str, str]]) -> str:
    means: dict[str, dict[str, float]] = {}
    for row in rows:
        means.setdefault(row["model"], {})[row["method"]] = float(row["mean"])
    # A table of other models can lack a method.
    differences = [
        f"{of['bidirectional'] - of['dense']:+.2f} points ({model})"
        for model, of in means.items()
        if {"bidirectional", "dense"} <= of.keys()
    ]
    first = rows[0]
    seeds = len(first["by_seed"].split())
    return (
        f"Bidirectional TopK with K = 0.001 d compared with dense: {', '.join(differences)}\n"
        f"{first['dataset']}, {first['workers']} workers, {first['steps']} steps, {seeds} seeds"
    )
