"""The pictures of the three parts, drawn from their CSV files."""

from itertools import pairwise
from math import isnan
from pathlib import Path
from statistics import fmean
from typing import Any

from recipes.bidirectional_topk import counterexample
from recipes.bidirectional_topk.downlink import random_union
from recipes.bidirectional_topk.methods import METHODS
from recipes.bidirectional_topk.problems import SHIFTED_DIGITS
from recipes.bidirectional_topk.runs import WINDOW
from recipes.bidirectional_topk.summary import (
    PUBLISHED,
    Quantity,
    Scores,
    TrafficMeans,
    Unions,
    grouped,
    growth,
    scores,
    traffic_means,
    usual,
)
from recipes.result_files import pyplot, read_csv, save_figure
from recipes.spread import paired, spread


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


def draw_union(folder: Path) -> None:
    """Draw the union against the step and against N, the saving, and the counted bytes."""
    rows = read_csv(folder / "union.csv")
    groups = grouped(rows)
    figure, axes = pyplot().subplots(2, 2, figsize=(13, 10), layout="constrained")
    figure.suptitle(_union_title(usual(groups)))
    _draw_union_curves(axes[0, 0], usual(groups))
    _draw_unions(axes[0, 1], groups)
    _draw_savings(axes[1, 0], usual(groups))
    _draw_bytes(axes[1, 1], traffic_means(rows))
    for each in axes.flat:
        each.grid(True, alpha=0.3)
        each.legend(fontsize=8)
    save_figure(figure, folder / "union.png")


def _union_title(groups: list[Unions]) -> str:
    most = groups[-1]
    late = spread(most.late.values())
    return (
        f"{most.run.workers} workers send {late.with_deviation(1)} K different entries (MLP, "
        f"{most.run.dataset}, K = {most.run.ratio:g} d): a server that sends K of them "
        f"sends {spread(most.saving.values()).mean:.0f}x fewer bytes"
    )


def _draw_union_curves(axes: Any, groups: list[Unions]) -> None:
    for index, each in enumerate(groups):
        curves = list(zip(*each.windows.values(), strict=True))
        steps = [WINDOW * (i + 0.5) for i in range(len(curves))]
        label = f"N = {each.run.workers}"
        axes.plot(steps, [fmean(c) for c in curves], color=f"C{index}", label=label)
        axes.fill_between(
            steps, [min(c) for c in curves], [max(c) for c in curves], color=f"C{index}", alpha=0.2
        )
        axes.axhline(each.random, color=f"C{index}", linestyle=":", linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel("union of supports, in units of K")
    axes.set_title(
        "Unidirectional, MLP; shaded: range of the seeds; dotted: random supports", fontsize=10
    )


def _draw_unions(axes: Any, groups: list[Unions]) -> None:
    digits = usual(groups)
    k = f"K = {digits[0].run.ratio:g} d"
    curves = {
        "MLP": digits,
        "CNN": usual(groups, model="cnn"),
        "MLP, shifted digits": usual(groups, dataset=SHIFTED_DIGITS),
    }
    for (name, found), marker in zip(curves.items(), "osD", strict=True):
        n, late = [e.run.workers for e in found], [spread(e.late.values()) for e in found]
        errors = [0.0 if isnan(each.deviation) else each.deviation for each in late]
        axes.errorbar(n, [each.mean for each in late], errors, fmt=marker + "-", label=name)
    most = digits[-1]
    grid = range(1, most.run.workers + 1)
    random = [random_union(most.d, most.k, n) for n in grid]
    axes.plot(grid, random, ":", color="black", label="random supports")
    shown = {n: union for n, union in PUBLISHED.items() if n <= most.run.workers}
    if shown:
        axes.plot(list(shown), list(shown.values()), "k*", markersize=11, label="thesis")
    axes.set_xlabel("workers N")
    axes.set_ylabel("union of supports, in units of K")
    last = digits[0].steps
    axes.set_title(f"Mean over steps {last * 3 // 5 + 1} to {last}, {k}", fontsize=10)


def _draw_savings(axes: Any, groups: list[Unions]) -> None:
    quantities: dict[str, Quantity] = {
        "entries": lambda each: each.late,
        "bytes": lambda each: each.saving,
    }
    n = [each.run.workers for each in groups]
    for index, (name, quantity) in enumerate(quantities.items()):
        fit = growth(groups, quantity)
        means = [spread(quantity(each).values()).mean for each in groups]
        power = f"N^{fit.exponent.mean:.2f}"
        line = f"{fit.intercept.mean:.2f} + {fit.slope.mean:.3f} N, R² = {fit.r2.mean:.4f}"
        axes.plot(n, means, "os"[index], color=f"C{index}", label=f"{name}: {line}; {power}")
        ends = [0, n[-1]]
        heights = [fit.intercept.mean + fit.slope.mean * x for x in ends]
        axes.plot(ends, heights, color=f"C{index}")
    axes.set_xlabel("workers N")
    axes.set_ylabel("saving: union over K entries, times")
    axes.set_title("Saving on the downlink of a server (MLP), with straight lines", fontsize=10)


def _draw_bytes(axes: Any, received: list[TrafficMeans]) -> None:
    n = [each.workers for each in received]
    columns: dict[str, list[float]] = {
        "bidirectional: entries down": [each.down for each in received],
        "bidirectional: entries up and down": [e.up + e.down for e in received],
        "bidirectional: all, with the selection": [each.total for each in received],
        'bidirectional, selection="shard": all': [each.by_shard for each in received],
        "bidirectional: entries up, busiest rank": [each.busiest for each in received],
        "unidirectional by all-gather": [each.gather for each in received],
        "unidirectional, sharded": [each.sharded for each in received],
    }
    for (label, heights), marker in zip(columns.items(), "osDPx^v", strict=True):
        axes.plot(n, heights, marker + "-", label=label)
    axes.set_yscale("log")
    # Leave room for the legend above the curves.
    axes.set_ylim(top=50 * max(columns["unidirectional, sharded"]))
    axes.set_xlabel("ranks N")
    axes.set_ylabel("bytes that a rank receives per step (log)")
    axes.set_title("Without a server (MLP), after training", fontsize=10)


def draw_accuracy(folder: Path) -> None:
    """Draw every seed's test accuracy, and mean and deviation, by problem and method."""
    found = scores(read_csv(folder / "accuracy.csv"))
    figure, axes = pyplot().subplots(figsize=(10, 5), layout="constrained")
    labels = []
    for place, ((model, workers), methods) in enumerate(found.items()):
        labels.append(f"{model.upper()}, N = {workers}")
        for index, name in enumerate(METHODS):
            x = place + 0.2 * (index - 1.5)
            values = [*methods[name].accuracies.values()]
            mean = spread(values)
            error = 0.0 if isnan(mean.deviation) else mean.deviation
            axes.plot([x] * len(values), values, ".", color="grey", markersize=4)
            style = {"fmt": "osD^"[index], "color": f"C{index}", "capsize": 5}
            axes.errorbar(x, mean.mean, error, label="" if place else name, **style)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylabel("test accuracy, %   (mean and deviation; grey: each seed)")
    axes.set_title(_accuracy_title(found), fontsize=10)
    axes.grid(True, axis="y", alpha=0.3)
    axes.legend(fontsize=8)
    save_figure(figure, folder / "accuracy.png")


def _accuracy_title(found: dict[tuple[str, int], dict[str, Scores]]) -> str:
    differences = [
        paired(methods["bidirectional"].accuracies, methods["unidirectional"].accuracies).mean
        for methods in found.values()
    ]
    seeds = len(next(iter(found.values()))["dense"].accuracies)
    return (
        f"Bidirectional TopK is {min(differences):+.2f} to {max(differences):+.2f} points from "
        f"unidirectional, in the mean over {seeds} seeds"
    )
