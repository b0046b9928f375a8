"""The pictures of the parts, from their CSV files."""

import math
from functools import partial
from pathlib import Path
from statistics import median
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
    curve_of,
    name_of,
    speed_ratios,
)
from recipes.pictures import Line, Panel, draw
from recipes.rows import Row, distinct, grouped, read_rows, spread, where


def convergence(optimizer: str, folder: Path, path: Path) -> None:
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


PICTURES = {
    "convergence_sgd": partial(convergence, "sgd"),
    "convergence_lars": partial(convergence, "lars"),
}
