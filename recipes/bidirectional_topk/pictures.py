"""The plots of workers.py, and the straight line through savings against N."""

import statistics
from pathlib import Path
from typing import Any

from recipes.bidirectional_topk.accuracy import Score
from recipes.bidirectional_topk.downlink import PUBLISHED, Downlink, random_union
from recipes.result_files import pyplot, save_figure

_MARKS = {"mlp": "o", "cnn": "s"}


def line(rows: list[Downlink]) -> tuple[float, float, float]:
    """Return slope, intercept and R^2 of the saving against the number of workers."""
    n, saving = [row.workers for row in rows], [row.saving for row in rows]
    slope, intercept = statistics.linear_regression(n, saving)
    return slope, intercept, statistics.correlation(n, saving) ** 2


def by_model(rows: list[Downlink], method: str) -> dict[str, list[Downlink]]:
    """Group one method's rows by model and phase, in order of N."""
    groups: dict[str, list[Downlink]] = {}
    for row in sorted(rows, key=lambda row: row.workers):
        if row.method == method:
            groups.setdefault(f"{row.model}, {row.phase}", []).append(row)
    return groups


def draw_downlink(rows: list[Downlink], path: Path) -> None:
    """Draw unions, savings and counted bytes against the number of workers."""
    figure, axes = pyplot().subplots(1, 3, figsize=(15, 4.8), layout="constrained")
    _draw_unions(axes[0], rows)
    _draw_savings(axes[1], rows)
    _draw_bytes(axes[2], rows)
    for each in axes:
        each.set_xlabel("workers N")
        each.grid(True, alpha=0.3)
        each.legend(fontsize=7)
    save_figure(figure, path)


def _draw_unions(axes: Any, rows: list[Downlink]) -> None:
    counts = sorted({row.workers for row in rows})
    # One way and both ways lie on each other; the table has both.
    for place, (name, held) in enumerate(by_model(rows, "bidirectional").items()):
        n, union = [row.workers for row in held], [row.union for row in held]
        axes.plot(n, union, _MARKS[held[0].model] + "-", color=f"C{place}", label=name)
    d, k = rows[0].d, rows[0].k
    grid = range(1, counts[-1] + 1)
    random = [random_union(d, k, n) for n in grid]
    axes.plot(grid, random, ":", color="black", label="random supports")
    shown = {n: union for n, union in PUBLISHED.items() if n <= counts[-1]}
    if shown:
        axes.plot(list(shown), list(shown.values()), "k*", markersize=10, label="thesis")
    axes.set_ylabel("union of supports, in units of K")
    axes.set_title(f"What an uncompressed downlink carries ({rows[0].dataset})")


def _draw_savings(axes: Any, rows: list[Downlink]) -> None:
    for place, (name, held) in enumerate(by_model(rows, "bidirectional").items()):
        n = [row.workers for row in held]
        slope, intercept, fit = line(held)
        axes.plot(n, [row.saving for row in held], _MARKS[held[0].model], color=f"C{place}")
        label = f"{name}: {intercept:.2f} + {slope:.3f} N, R² = {fit:.3f}"
        ends = [0, n[-1]]
        axes.plot(ends, [intercept + slope * x for x in ends], color=f"C{place}", label=label)
    axes.set_ylabel("bytes of the union / bytes of K entries")
    axes.set_title("Saved on the way from a server to a worker")


def _draw_bytes(axes: Any, rows: list[Downlink]) -> None:
    *_, held = by_model(rows, "bidirectional").values()
    n = [row.workers for row in held]
    columns = {
        "bidirectional: downlink messages": [row.down for row in held],
        "bidirectional: up and downlink messages": [row.down + row.up for row in held],
        "bidirectional: all, with control": [row.down + row.up + row.control for row in held],
        'bidirectional, selection="shard": all': [row.by_shard for row in held],
        "bidirectional: up, busiest rank": [row.up_most for row in held],
        "ef(topk) by all-gather": [row.gather for row in held],
        "ef(topk), sharded": [row.sharded for row in held],
    }
    for (label, heights), mark in zip(columns.items(), "osDPx^v", strict=True):
        axes.plot(n, heights, mark + "-", label=label)
    axes.set_yscale("log")
    # Room for the legend above the curves.
    axes.set_ylim(top=30 * max(columns["ef(topk), sharded"]))
    axes.set_ylabel("bytes that a rank receives per step (log)")
    axes.set_title(f"Without a server: {held[0].model}, d = {held[0].d:,}, K = {held[0].k}")


def draw_accuracy(scores: list[Score], path: Path) -> None:
    """Draw every seed's test accuracy, and mean and deviation, by model and method."""
    figure, axes = pyplot().subplots(figsize=(8, 4.5), layout="constrained")
    for place, score in enumerate(scores):
        axes.plot([place] * len(score.accuracies), score.accuracies, ".", color="grey")
        axes.errorbar(place, score.mean, score.deviation, fmt="o", color="C0", capsize=6)
        axes.annotate(
            f"{score.mean:.2f} ± {score.deviation:.2f}\nlr {score.lr:g}",
            (place, score.mean),
            xytext=(8, 0),
            textcoords="offset points",
            verticalalignment="center",
            fontsize=8,
        )
    labels = [f"{score.model}\n{score.method}" for score in scores]
    axes.set_xticks(range(len(scores)), labels, fontsize=8)
    axes.set_xlim(-0.5, len(scores) - 0.1)
    axes.set_ylabel("test accuracy, %")
    first = scores[0]
    axes.set_title(
        f"{first.dataset}, {first.workers} workers, {first.steps} steps, "
        f"{len(first.accuracies)} seeds: mean and deviation"
    )
    axes.grid(True, axis="y", alpha=0.3)
    save_figure(figure, path)
