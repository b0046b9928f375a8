"""Pictures of the contest and of the scaling, drawn from their CSV files."""

from pathlib import Path
from typing import Any

from recipes.result_files import pyplot, read_csv, save_figure
from recipes.two_direction.contest import METHODS, Setting
from recipes.two_direction.contest_table import CURVE_COLUMNS, ContestRow, median_totals
from recipes.two_direction.scaling import FALL, Count, Sweep, exponents, theory_factor

# Bytes are left out: their curves have the shapes of those of all coordinates.
_AXES = {
    "up": "coordinates up",
    "down": "coordinates down",
    "total": "coordinates, up and down",
}
# Every method has the same colour in all pictures.
_COLOURS = {method: f"C{index}" for index, method in enumerate(METHODS)}
# The methods of the paper's own comparison. The horizontal axes end where the slowest of them
# reaches the gap, because the slow ones of the others would press the rest together.
_PAPER = ("2Direction", "AGD", "EF21-P + DIANA")


def draw_contest(results: Path, curves: Path, setting: Setting) -> None:
    """Draw the gap of f against coordinates. Thick lines are the methods of the paper."""
    rows = [ContestRow.read(row) for row in read_csv(results)]
    by_method = _read_curves(curves)
    figure, panels = pyplot().subplots(1, 3, figsize=(15, 5.4), sharey=True, layout="constrained")
    for axes, (quantity, label) in zip(panels, _AXES.items(), strict=True):
        for method, curve in by_method.items():
            # The last point can lie anywhere below the gap, and even at f* or below it.
            heights = [max(height, setting.gap / 10) for height in curve["gap"]]
            is_paper = method in _PAPER
            style = {"linewidth": 2.5 if is_paper else 1.3, "alpha": 1 if is_paper else 0.8}
            axes.plot(curve[quantity], heights, _COLOURS[method], label=method, **style)
        ends = [curve[quantity][-1] for method, curve in by_method.items() if method in _PAPER]
        _finish(axes, label, max(ends, default=None))
    panels[0].set_ylabel("f(x) − f*")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=8)
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
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.locator_params(axis="x", nbins=5)
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
