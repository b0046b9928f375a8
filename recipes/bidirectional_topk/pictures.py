"""The pictures of the parts, drawn from their CSV files."""

from pathlib import Path
from statistics import fmean

from recipes.bidirectional_topk import counterexample
from recipes.bidirectional_topk.runs import WINDOW
from recipes.bidirectional_topk.tables import PUBLISHED, Unions, random_union, unions_of, usual
from recipes.pictures import MARKERS, Line, Panel, draw, spreads
from recipes.rows import read_rows, spread


def counterexample_picture(folder: Path, path: Path) -> None:
    """Draw F - F* against t at the thesis's learning rate, and its late mean against the lr."""
    gaps = counterexample.late_gaps(read_rows(folder / "counterexample.csv"))
    curves = read_rows(folder / "counterexample_curves.csv")
    # Below 0.001 there is only rounding, which a log axis would show as noise.
    lines = [
        Line(
            method,
            [row["t"] for row in curves],
            [max(row[method] - counterexample.MINIMUM, 1e-3) for row in curves],
        )
        for method in counterexample.METHODS
    ]
    scan = [
        Line(method, list(gaps), [each[method] for each in gaps.values()], style={"marker": "o"})
        for method in counterexample.SCANNED
    ]
    kept = f"3 ranks, one entry of {counterexample.DIMENSIONS} kept"
    late = f"t in [{counterexample.LATE_FROM}, {counterexample.STEPS})"
    left = Panel("step t", "F(w) − F*   (cut off at 0.001)", kept, lines, log="y")
    right = Panel(
        x="learning rate (dotted: the thesis's)",
        y=f"mean of F(w) − F* over {late}",
        lines=scan,
        log="y",
        xmarks=[counterexample.LR],
    )
    at = gaps[counterexample.LR]
    ratio = at["unidirectional"] / at["bidirectional"]
    title = (
        f"Counterexample at lr {counterexample.LR:g}: bidirectional TopK's distance to the minimum "
        f"is 1/{ratio:.2f} of unidirectional's"
    )
    draw(path, title, [left, right], size=(5.5, 4.4))


def union(folder: Path, path: Path) -> None:
    groups = unions_of(folder)
    most = usual(groups)[-1]
    title = (
        f"{most.workers} workers send {spread(most.late.values()).with_deviation(1)} K different "
        f"entries (MLP, {most.dataset}, K = {most.ratio:g} d): a server that sends K of them sends "
        f"{spread(most.saving.values()).mean:.0f}x fewer bytes"
    )
    draw(path, title, [_curves(usual(groups)), _unions(groups)], size=(6.5, 4.8))


def _curves(groups: list[Unions]) -> Panel:
    lines = []
    for number, each in enumerate(groups):
        steps = [WINDOW * (i + 0.5) for i in range(each.steps // WINDOW)]
        style = {"color": f"C{number}"}
        middle = [fmean(found) for found in zip(*each.windows.values(), strict=True)]
        ends = [max(found) - min(found) for found in zip(*each.windows.values(), strict=True)]
        half = [end / 2 for end in ends]
        lines.append(Line(f"N = {each.workers}", steps, middle, half, style, band=True))
        dotted = {**style, "linestyle": ":"}
        lines.append(Line("_", [steps[0], steps[-1]], [each.random, each.random], style=dotted))
    title = "Unidirectional, MLP; shaded: range of the seeds; dotted: random supports"
    return Panel("step", "union of supports, in units of K", title, lines, legend=True)


def _unions(groups: list[Unions]) -> Panel:
    found = {"MLP": usual(groups), "CNN": usual(groups, model="cnn")}
    lines = [
        spreads(name, {e.workers: spread(e.late.values()) for e in own}, marker=marker)
        for (name, own), marker in zip(found.items(), MARKERS, strict=False)
    ]
    most = found["MLP"][-1]
    grid = range(1, most.workers + 1)
    random = [random_union(most.d, most.k, n) for n in grid]
    lines.append(Line("random supports", grid, random, style={"color": "black", "ls": ":"}))
    shown = {n: value for n, value in PUBLISHED.items() if n <= most.workers}
    stars = {"color": "black", "marker": "*", "linestyle": "none", "markersize": 11}
    lines.append(Line("thesis" if shown else "_", list(shown), list(shown.values()), style=stars))
    title = f"Mean over steps {most.steps * 3 // 5 + 1} to {most.steps}, K = {most.ratio:g} d"
    return Panel("workers N", "union of supports, in units of K", title, lines, legend=True)


PICTURES = {"counterexample": counterexample_picture, "union": union}
