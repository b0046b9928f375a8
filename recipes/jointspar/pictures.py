"""The pictures of the parts, from their CSV files."""

import math
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from recipes.jointspar.convergence import (
    DENSE,
    OURS,
    PAPER,
    QUANTITIES,
    chosen_lrs,
    steps_per_epoch,
)
from recipes.jointspar.methods import parse_method
from recipes.jointspar.tables import (
    LEVELS,
    Contender,
    contenders_of,
    curve_of,
    name_of,
    speed_ratios,
)
from recipes.pictures import MARKERS, Line, Panel, draw
from recipes.rows import Row, distinct, grouped, over_seeds, paired, read_rows, spread, where


def convergence(optimizer: str, folder: Path, path: Path) -> None:
    """Draw loss and accuracy against the step, for each number of workers."""
    lr = chosen_lrs(read_rows(folder / "convergence_tuning.csv"))[optimizer, DENSE]
    rows = where(read_rows(folder / "convergence_curves.csv"), optimizer=optimizer, lr=lr)
    styles = _styles(distinct(rows, "method"))
    workers = sorted(distinct(rows, "workers"))
    loss, accuracy = (
        [_medians(where(rows, workers=n, quantity=each), styles) for n in workers]
        for each in QUANTITIES
    )
    losses = where(rows, quantity=QUANTITIES[0])
    finding = [
        f"{name_of(method).replace('`', '')}: "
        + "/".join(
            f"{spread(ratios).mean:.2f}"
            for n in workers
            if (ratios := speed_ratios(where(losses, workers=n), method, LEVELS[-1]))
        )
        for method in (PAPER, OURS)
    ]
    title = (
        f"{optimizer.upper()}, medians of {len(distinct(rows, 'seed'))} seeds, lr {lr:g} per worker"
        f". Steps to a loss of {LEVELS[-1]:g}, compared with dense, of runs that reach it:\n"
        f"{'; '.join(finding)} ({'/'.join(map(str, workers))} workers, 60 % of the layers)"
    )
    draw(path, title, loss, accuracy, size=(4.6, 3.8), columns=3)


def _medians(rows: list[Row], styles: dict[str, dict[str, Any]]) -> Panel:
    n, is_loss = rows[0]["workers"], rows[0]["quantity"] == QUANTITIES[0]
    worst = math.inf if is_loss else 0.0
    lines, missing = [], []
    for method, runs in grouped(rows, "method").items():
        curves = [curve_of(row) for row in runs]
        if 2 * sum(math.isnan(curve[-1]) for curve in curves) >= len(curves):
            missing.append(styles[method]["label"])
            continue
        known = [[worst if math.isnan(value) else value for value in curve] for curve in curves]
        y = [median(values) for values in zip(*known, strict=True)]
        x = [steps_per_epoch(n) * epoch for epoch in range(1, len(y) + 1)]
        style = {name: value for name, value in styles[method].items() if name != "label"}
        lines.append(Line(styles[method]["label"], x, y, style=style))
    note = ["no line: half or more of the runs diverged", *missing] if missing and is_loss else []
    return Panel(
        x="" if is_loss else "step",
        y="training loss, nats" if is_loss else "test accuracy, %",
        title=f"{n} workers" if is_loss else "",
        lines=lines,
        log="y" if is_loss else "",
        ylim=(None, None) if is_loss else (90, 99),
        note="\n".join(note),
    )


def _styles(methods: list[str]) -> dict[str, dict[str, Any]]:
    names = list(dict.fromkeys(name_of(method) for method in methods if method != DENSE))
    styles = {}
    for method in methods:
        name, budget = name_of(method), parse_method(method).budget
        # Dotted, because it would hide the paper's rule, which stays close to uniform.
        line = ":" if name.startswith("uniform") else "--" if budget < 0.5 else "-"
        color = "black" if method == DENSE else f"C{names.index(name)}"
        label = name.replace("`", "") + ("" if method == DENSE else f", {budget:.0%}")
        styles[method] = {"color": color, "linestyle": line, "label": label}
    return styles


def accuracy(folder: Path, path: Path) -> None:
    """Draw test accuracy against the share of bytes sent, with the deviation over the seeds."""
    dense, *others = contenders_of(folder)
    groups: dict[str, list[Contender]] = {}
    for each in others:
        groups.setdefault(each.label, []).append(each)
    lines = []
    for number, (label, own) in enumerate(groups.items()):
        own = sorted(own, key=lambda each: each.share)
        # Moved apart: methods with the same budget would hide each other.
        move = 0.8 * (number - len(groups) / 2)
        x = [100 * each.share + move for each in own]
        lines.append(_points(label, own, x, f"C{number}", MARKERS[number]))
    mean, deviation = dense.accuracy.mean, dense.accuracy.deviation
    band = {"color": "black", "linewidth": 1}
    lines.append(
        Line("dense LARS, ± 1 deviation", [0, 92], [mean] * 2, [deviation] * 2, band, band=True)
    )
    panel = Panel(
        x="bytes sent, % of dense DDP's (methods moved apart)",
        y=f"test accuracy of runs that did not fail, % ({len(dense.tests[dense.lr])} seeds)",
        lines=lines,
        xlim=(0, None),
    )
    found = [
        f"{paired(each.finished(), dense.finished()).with_error()} points at {each.budget:.0%}"
        for each in groups["JointSpar-LARS"]
        if each.budget in (0.6, 0.3) and each.finished().keys() & dense.finished().keys()
    ]
    title = f"JointSpar-LARS, compared with dense LARS (± standard error): {', '.join(found)}"
    draw(path, title, [panel], size=(9, 5))


def _points(label: str, own: list[Contender], x: list[float], color: str, marker: str) -> Line:
    notes = [f"{e.failed()} of {len(e.tests[e.lr])} failed" if e.failed() else "" for e in own]
    style = {"marker": marker, "color": color}
    means = [each.accuracy.mean for each in own]
    errors = [each.accuracy.deviation for each in own]
    shown = [0.0 if math.isnan(error) else error for error in errors]
    return Line(label, x, means, shown, style, notes=notes)


def bandit(folder: Path, path: Path) -> None:
    """Draw the cost above the optimum of all forms; only the best of the paper's has a colour."""
    rows, curves = read_rows(folder / "bandit.csv"), read_rows(folder / "bandit_curves.csv")
    end = next(name for name in rows[0] if name.startswith("excess_at_"))
    final = {form: over_seeds(own, end).mean for form, own in grouped(rows, "form").items()}
    best = min((form for form in final if form.startswith("literal")), key=final.__getitem__)
    lines, change = [], int(end.removeprefix("excess_at_"))
    for form, own in grouped(curves, "form").items():
        y = [100 * fmean(values) for values in zip(*map(curve_of, own), strict=True)]
        style = {"color": "black", "linestyle": "--"} if form == "uniform" else {}
        if form.startswith("literal") and form != best:
            style = {"color": "0.8", "linewidth": 0.8}
        steps = [int(name) for name in own[0] if name.isdecimal()]
        lines.append(Line(f"{form} (best)" if form == best else form, steps, y, style=style))
    panel = Panel(
        x=f"step (norms change at {change:,})",
        y="cost above the optimum, %",
        lines=lines,
        log="y",
        xmarks=[change],
        ymarks=[2],
    )
    shares = ", ".join(
        f"{form} {final[form]:.2%}" for form in ("uniform", "baseline, alpha 0.01", best)
    )
    draw(
        path,
        f"JointSpar's bandit, cost above the optimum after {change:,} steps: {shares}",
        [panel],
        size=(9, 5),
    )


PICTURES = {
    "bandit": bandit,
    "convergence_sgd": partial(convergence, "sgd"),
    "convergence_lars": partial(convergence, "lars"),
    "accuracy": accuracy,
}
