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
    medians over the seeds. A run that diverged counts as the worst, so a method of which half of
    the runs diverged has no line.

    Args:
        optimizer: "sgd" or "lars".
        curves: the rows of ``convergence_curves.csv``.
        lrs: the chosen learning rates, by optimizer and method.
        path: path of the picture.
    """
    lr = lrs[optimizer, DENSE]
    rows = selected(curves, optimizer=optimizer, lr=lr)
    workers = sorted({int(row["workers"]) for row in rows})
    methods = list(dict.fromkeys(row["method"] for row in rows))
    budgets = sorted({parse_method(method).budget for method in methods} - {1.0}, reverse=True)
    names = list(dict.fromkeys(name_of(method) for method in methods if method != DENSE))
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
            for method in methods:
                budget = parse_method(method).budget
                line_style = "--" if budget in budgets[1:] else "-"
                # Dotted, because it would hide the paper's rule, which stays close to uniform.
                line_style = ":" if name_of(method).startswith("uniform") else line_style
                color = "black" if method == DENSE else f"C{names.index(name_of(method))}"
                name = name_of(method).replace("`", "")
                label = name if budget == 1 else f"{name}, {budget:.0%}"
                style = {"color": color, "linestyle": line_style, "label": label}
                curves_of = curves_by_seed(selected(of_panel, method=method)).values()
                _draw_median(each, list(curves_of), quantity, steps_per_epoch(count), style)
            _label(each, line, quantity, f"{count} workers, lr {lr * count:g}")
    seeds = len({row["seed"] for row in rows})
    figure.suptitle(f"{optimizer.upper()}, medians of {seeds} seeds. {_finding(rows)}", fontsize=11)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    save_figure(figure, path)


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


def _draw_median(
    axes: Any, curves: list[list[float]], quantity: str, per_epoch: int, style: dict[str, str]
) -> None:
    worst = np.inf if quantity == "train_loss" else 0.0
    median = np.median(np.nan_to_num(np.array(curves), nan=worst), axis=0)
    axes.plot(per_epoch * np.arange(1, len(median) + 1), median, linewidth=1.3, **style)


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
