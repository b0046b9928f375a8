"""Pictures of the contest and of the scaling, drawn from their CSV files."""

from pathlib import Path
from typing import Any

from recipes.result_files import pyplot, read_csv, save_figure
from recipes.two_direction.contest import METHODS, Setting
from recipes.two_direction.contest_table import CURVE_COLUMNS, ContestRow, median_totals
from recipes.two_direction.scaling import FALL, Count, Sweep, exponents, theory_factor

_AXES = {
    "up": "coordinates up",
    "down": "coordinates down",
    "total": "coordinates, up and down",
    "bytes": "bytes of the messages, up and down",
}
# Every method has the same colour in all pictures.
_COLOURS = {method: f"C{index}" for index, method in enumerate(METHODS)}
# The methods of the paper's own comparison. The horizontal axes end where the slowest of them
# reaches the gap, because the slow ones of the others would press the rest together.
_PAPER = ("2Direction", "AGD", "EF21-P + DIANA")


def draw_contest(results: Path, curves: Path, setting: Setting) -> None:
    """Draw f and its gap against coordinates and bytes."""
    rows = [ContestRow.read(row) for row in read_csv(results)]
    by_method = _read_curves(curves)
    figure, axes = pyplot().subplots(2, 4, figsize=(20, 9), sharey="row", layout="constrained")
    for column, (quantity, label) in enumerate(_AXES.items()):
        for method, curve in by_method.items():
            colour = _COLOURS[method]
            axes[0, column].plot(curve[quantity], curve["value"], colour, label=method)
            # The last point can lie anywhere below the gap, and even at f* or below it.
            heights = [max(height, setting.gap / 10) for height in curve["gap"]]
            axes[1, column].plot(curve[quantity], heights, colour, label=method)
        ends = [curve[quantity][-1] for method, curve in by_method.items() if method in _PAPER]
        for each in axes[:, column]:
            _finish(each, label, max(ends, default=None))
    axes[0, 0].set_ylabel("f(x)")
    axes[1, 0].set_ylabel("f(x) − f*")
    axes[0, 0].legend(fontsize=9)
    figure.suptitle(f"{contest_title(rows, setting.gap)}\n{_conditions(rows, setting)}")
    save_figure(figure, results.with_suffix(".png"), dpi=80)


def contest_title(rows: list[ContestRow], gap: float) -> str:
    """Return what the picture shows: which method sends least, and how much less."""
    totals = median_totals(rows)
    if len(totals) < 2:
        return f"Traffic of a worker until f − f* ≤ {gap:g}"
    first, second, *_ = totals
    if first == "2Direction":
        compared = [second, *(method for method in _PAPER if method in totals)]
    else:
        compared = ["2Direction" if "2Direction" in totals else second]
    # The second best can be one of the paper's methods.
    others = [method for method in dict.fromkeys(compared) if method != first]
    ratios = [f"{totals[method] / totals[first]:.2f}x fewer than {method}" for method in others]
    return f"Coordinates until f − f* ≤ {gap:g}: {first} needs {'; '.join(ratios)}"


def _conditions(rows: list[ContestRow], setting: Setting) -> str:
    seeds = len({row.seed for row in rows})
    counted = f"median of {seeds} seeds" if seeds > 1 else "one seed"
    return f"{setting}; {counted}; curves of seed 0"


def _finish(axes: Any, label: str, most: float | None) -> None:
    axes.set_yscale("log")
    axes.set_xlabel(label)
    axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 4))
    axes.grid(True, alpha=0.3)
    if most is not None:
        axes.set_xlim(0, 1.05 * most)


def _read_curves(path: Path) -> dict[str, dict[str, list[float]]]:
    curves: dict[str, dict[str, list[float]]] = {}
    for row in read_csv(path):
        curve = curves.setdefault(row["method"], {name: [] for name in CURVE_COLUMNS[1:]})
        for name in CURVE_COLUMNS[1:]:
            curve[name].append(float(row[name]))
    return curves


def draw_sweep(path: Path, sweep: Sweep) -> None:
    """Draw the iterations of a sweep, and the theory's lines through their middle."""
    counts = [Count.read(sweep.field, row) for row in read_csv(path)]
    figure, axes = pyplot().subplots(figsize=(7.5, 5.5), layout="constrained")
    for method in dict.fromkeys(count.method for count in counts):
        _draw_counts(axes, [count for count in counts if count.method == method])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(sweep.label)
    axes.set_ylabel(f"iterations until f − f* has fallen to {FALL:g} of its start")
    axes.set_title(sweep_title(counts, sweep), fontsize=10)
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize=8)
    save_figure(figure, path.with_suffix(".png"), dpi=90)


def sweep_title(counts: list[Count], sweep: Sweep) -> str:
    """Return which compressed method takes fewer iterations at the last point of both."""
    by_method = {
        method: {count.x: count.iterations for count in counts if count.method == method}
        for method in ("2Direction", "EF21-P + DIANA")
    }
    common = set.intersection(*map(set, by_method.values()))
    if not common:
        return f"Iterations by {sweep.label}"
    last = max(common)
    (fewer, least), (more, most) = sorted(
        ((method, own[last]) for method, own in by_method.items()), key=lambda item: item[1]
    )
    saving = f"{fewer} takes {most / least:.1f}x fewer iterations than {more}"
    return f"{saving}\nat {sweep.label} = {last:,g}"


def _draw_counts(axes: Any, counts: list[Count]) -> None:
    method, xs = counts[0].method, [count.x for count in counts]
    # Theory leaves the constant open. The geometric mean of the ratios fits it.
    factor = theory_factor(counts)
    measured, predicted = exponents(counts)
    style = {"color": _COLOURS[method]}
    label = f"{method}: slope {measured:+.2f}"
    axes.plot(xs, [count.iterations for count in counts], "o-", label=label, **style)
    dashed = f"theory, times {factor:.2g}: slope {predicted:+.2f}"
    axes.plot(xs, [factor * count.theory for count in counts], "--", label=dashed, **style)
