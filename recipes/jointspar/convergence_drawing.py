"""The pictures of the convergence experiment."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recipes.jointspar.convergence_runs import steps_per_epoch
from recipes.jointspar.convergence_summary import (
    DENSE,
    LEVELS,
    OURS,
    PAPER,
    QUANTITIES,
    LrByMethod,
    Row,
    curves_by_seed,
    name_of,
    selected,
    speed_ratios,
)
from recipes.jointspar.methods import parse_method
from recipes.result_files import pyplot, save_figure
from recipes.spread import spread

_AXES = {"train_loss": "training loss, nats", "test_accuracy": "test accuracy, %"}


def draw_convergence(optimizer: str, curves: Sequence[Row], lrs: LrByMethod, path: Path) -> None:
    """Draw loss and accuracy against the step, for each number of workers.

    All methods have dense training's learning rate, so that only the sampling differs. Lines are
    medians over the seeds, in which a run that diverged counts as the worst. A method has no line
    if half of its runs diverged. The panel then names it, and the legend has only what is drawn.

    Args:
        optimizer: "sgd" or "lars".
        curves: the rows of ``convergence_curves.csv``.
        lrs: the chosen learning rates, by optimizer and method.
        path: path of the picture.
    """
    lr = lrs[optimizer, DENSE]
    rows = selected(curves, optimizer=optimizer, lr=lr)
    workers = sorted({int(row["workers"]) for row in rows})
    styles = _styles(list(dict.fromkeys(row["method"] for row in rows)))
    figure, axes = pyplot().subplots(
        *(2, len(workers)),
        figsize=(4.6 * len(workers), 7.6),
        layout="constrained",
        sharey="row",
        squeeze=False,
    )
    for line, quantity in enumerate(QUANTITIES):
        for each, count in zip(axes[line], workers, strict=True):
            of_panel = selected(rows, workers=count, quantity=quantity)
            missing = _draw_medians(each, of_panel, steps_per_epoch(count), styles)
            _label(each, line, quantity, f"{count} workers, lr {lr * count:g}")
            if missing and line == 0:
                _name_missing(each, missing)
    seeds = len({row["seed"] for row in rows})
    figure.suptitle(f"{optimizer.upper()}, medians of {seeds} seeds. {_finding(rows)}", fontsize=11)
    panels = [each.get_legend_handles_labels() for each in axes.flat]
    drawn = {label: handle for pair in panels for handle, label in zip(*pair, strict=True)}
    figure.legend(drawn.values(), drawn, loc="outside lower center", ncols=3)
    save_figure(figure, path)


def _styles(methods: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return color, line style and label of each method's line."""
    budgets = sorted({parse_method(method).budget for method in methods} - {1.0}, reverse=True)
    names = list(dict.fromkeys(name_of(method) for method in methods if method != DENSE))
    styles = {}
    for method in methods:
        name, budget = name_of(method), parse_method(method).budget
        line_style = "--" if budget in budgets[1:] else "-"
        # Dotted, because it would hide the paper's rule, which stays close to uniform.
        line_style = ":" if name.startswith("uniform") else line_style
        color = "black" if method == DENSE else f"C{names.index(name)}"
        label = name.replace("`", "") + ("" if method == DENSE else f", {budget:.0%}")
        styles[method] = {"color": color, "linestyle": line_style, "label": label}
    return styles


def _finding(rows: Sequence[Row]) -> str:
    """State how many steps the paper's algorithm and ours need, compared with dense training."""
    level = LEVELS[-1]
    losses = selected(rows, quantity=QUANTITIES[0])
    workers = sorted({int(row["workers"]) for row in rows})
    parts = []
    for method in dict.fromkeys(row["method"] for row in rows):
        of_workers = [speed_ratios(selected(losses, workers=n), method, level) for n in workers]
        if method in (PAPER, OURS) and all(of_workers):
            means = "/".join(f"{spread(ratios).mean:.2f}" for ratios in of_workers)
            name = name_of(method).replace("`", "")
            parts.append(f"{name}, {parse_method(method).budget:.0%}: {means}")
    counts = "/".join(map(str, workers))
    compared = f"Steps to a training loss of {level:g} with {counts} workers, compared with dense"
    compared += ", of runs that reach it"
    return f"{compared}:\n{'; '.join(parts)}" if parts else "Loss and accuracy against the step"


def _draw_medians(
    axes: Any, rows: Sequence[Row], per_epoch: int, styles: dict[str, dict[str, str]]
) -> list[str]:
    """Draw the median of each method, and return the labels of those without a line."""
    missing = []
    for method in dict.fromkeys(row["method"] for row in rows):
        of_method = selected(rows, method=method)
        curves = np.array(list(curves_by_seed(of_method).values()))
        if 2 * np.isnan(curves[:, -1]).sum() >= len(curves):
            missing.append(styles[method]["label"])
            continue
        worst = np.inf if of_method[0]["quantity"] == QUANTITIES[0] else 0.0
        median = np.median(np.nan_to_num(curves, nan=worst), axis=0)
        axes.plot(
            per_epoch * np.arange(1, len(median) + 1), median, linewidth=1.3, **styles[method]
        )
    return missing


def _name_missing(axes: Any, labels: list[str]) -> None:
    text = "\n".join(["no line: half or more of the runs diverged", *labels])
    place = {"ha": "right", "va": "top", "transform": axes.transAxes}
    axes.text(0.98, 0.97, text, fontsize=7.5, color="0.35", **place)


def _label(axes: Any, line: int, quantity: str, title: str) -> None:
    if line == 0:
        axes.set_yscale("log")
        axes.set_title(title, fontsize=10)
    else:
        axes.set_ylim(90, 99)
        axes.set_xlabel("step")
    if axes.get_subplotspec().is_first_col():
        axes.set_ylabel(_AXES[quantity])
    axes.grid(True, alpha=0.3)
