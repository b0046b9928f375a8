"""Pictures of the parts, drawn from their CSV files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.result_files import pyplot, read_csv, save_figure
from recipes.spread import Spread, spread
from recipes.two_direction.contest import PAPER
from recipes.two_direction.methods import METHODS, Messages
from recipes.two_direction.outcomes import (
    Cost,
    cheapest,
    coordinates,
    over_seeds,
    priced,
    ratio,
    read_rows,
    select,
    tie,
)
from recipes.two_direction.race import Row
from recipes.two_direction.scaling import THEORY, Sweep, counts, exponent, sweeps
from recipes.two_direction.sweeps import DIGITS_D, K_UP, PRICED_K_DOWNS, PRICES, chance
from recipes.two_direction.winners import PRICES as MAP_PRICES
from recipes.two_direction.winners import D

# Every method has the same colour in all pictures.
COLOURS = {method: f"C{index}" for index, method in enumerate(METHODS)}
_OURS = "2Direction"
_THOUSAND = 1000
# The map's text must fit into its cells.
_SHORT = {"AGD, three sequences": "AGD 3-seq.", "EF21-P + DIANA": "EF21-P+\nDIANA"}


def draw_contest(path: Path) -> None:
    """Draw the coordinates by mu, and the gap against coordinates for each mu."""
    rows, curves = read_rows(path), read_csv(path.with_stem(f"{path.stem}_curves"))
    n, mus = rows[0].n, sorted({row.mu for row in rows})
    figure, panels = _subplots(1, len(mus) + 1, (4, 3.8))
    first, *others = panels[0]
    _draw_crossing(first, rows)
    for mu, axes in zip(mus, others, strict=True):
        _draw_gap(axes, [row for row in rows if row.mu == mu], curves)
    figure.legend(*_labels(panels), loc="outside lower center", ncols=8)
    figure.suptitle(
        f"Coordinates of a worker until f − f* is at most the gap, n = {n}\n"
        f"Left: mean and deviation of {_seeds(rows)}. Others: one seed, until the slowest of the "
        "thick lines reaches the gap"
    )
    save_figure(figure, path.with_suffix(".png"), dpi=80)


def _labels(panels: Any) -> tuple[list[Any], list[str]]:
    """Return the handles and labels of all panels, each label once."""
    found = {
        label: handle
        for axes in panels.flat
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    return list(found.values()), list(found)


def _draw_crossing(axes: Any, rows: Sequence[Row]) -> None:
    mus = sorted({row.mu for row in rows})
    for method in METHODS:
        found = [
            (float(i), over_seeds(select(rows, method, mu=mu), coordinates))
            for i, mu in enumerate(mus)
        ]
        points = [(x, each) for x, each in found if each]
        # No line joins points of different gaps.
        apart = [point for point in points if mus[int(point[0])] == 0]
        _draw_points(axes, apart, "_", _style(method))
        _draw_points(axes, points[len(apart) :], method, _style(method))
    gaps = {row.mu: row.gap for row in rows}
    axes.set_xticks(range(len(mus)), [f"{mu:g}\ngap {gaps[mu]:g}" for mu in mus])
    axes.set_xlabel("regulariser mu")
    axes.set_ylabel("thousand coordinates, up and down")
    _logarithmic(axes)


def _draw_gap(axes: Any, rows: Sequence[Row], curves: Sequence[dict[str, str]]) -> None:
    mu, gap = rows[0].mu, rows[0].gap
    for method in METHODS:
        own = [
            (float(point["total"]) / _THOUSAND, max(float(point["gap"]), gap / 10))
            for point in curves
            if (float(point["mu"]), point["method"]) == (mu, method)
        ]
        if own:
            axes.plot(*zip(*own, strict=True), label=method, **_style(method))
    axes.set_title(f"mu = {mu:g}")
    axes.set_ylabel("f − f*")
    axes.set_xlabel("thousand coordinates, up and down")
    ends = [row.total / _THOUSAND for row in rows if row.method in PAPER and row.reached]
    axes.set_yscale("log")
    axes.set_xlim(0, 1.05 * max(ends, default=1000.0))
    axes.set_ylim(bottom=gap / 2)
    axes.locator_params(axis="x", nbins=5)
    axes.grid(True, alpha=0.3)


def draw_downlink(path: Path) -> None:
    """Draw the coordinates by size of the downlink message, and the price of a run by r."""
    rows = read_rows(path)
    k_downs = [k for k in PRICED_K_DOWNS if k in {row.k_down for row in rows}]
    figure, panels = _subplots(1, 1 + len(k_downs), (5, 4.4))
    first, *others = panels[0]
    _draw_sizes(first, rows)
    for axes, k in zip(others, k_downs, strict=True):
        _draw_prices(axes, Messages(K_UP, k), rows)
    figure.legend(*_labels(panels), loc="outside lower center", ncols=5)
    figure.suptitle(
        f"Traffic until f − f* ≤ {rows[0].gap:g}: digits, n = 10, mu = 1e-3, K up = {K_UP}\n"
        f"mean and deviation of {_seeds(rows)}"
    )
    save_figure(figure, path.with_suffix(".png"), dpi=80)


def _draw_sizes(axes: Any, rows: Sequence[Row]) -> None:
    for method in ("2Direction", "EF21-P + DIANA"):
        own = select(rows, method, p=0.0)
        sizes = sorted({row.k_down for row in own})
        found = [(k, over_seeds(select(own, method, k_down=k), coordinates)) for k in sizes]
        points = [(k / DIGITS_D, each) for k, each in found if each]
        _draw_points(axes, points, method, _style(method))
    for method in ("AGD", "AGD, three sequences"):
        dense = over_seeds(select(rows, method), coordinates)
        if dense:
            axes.axhline(dense.mean / _THOUSAND, ls="--", color=COLOURS[method], label=method)
    axes.set_xscale("log")
    axes.set_xlabel("K down / d, the alpha of TopK")
    axes.set_ylabel("thousand coordinates, up and down")
    _logarithmic(axes)


def _draw_prices(axes: Any, sent: Messages, rows: Sequence[Row]) -> None:
    # AGD's messages do not depend on K.
    dense = [row for row in rows if row.method.startswith("AGD")]
    own = [*(row for row in rows if row.k_down == sent.k_down and row not in dense), *dense]
    for method in PAPER:
        points = [(r, over_seeds(select(own, method, p=0.0), priced(r))) for r in PRICES]
        found = [(r, each) for r, each in points if each]
        _draw_points(axes, found, method, _style(method))
    chosen = []
    for r in PRICES:
        for_r = chance(sent, r)
        cost = over_seeds(select(own, _OURS, p=for_r.p if for_r else 0.0), priced(r))
        if cost:
            chosen.append((r, cost))
    _draw_points(axes, chosen, "2Direction, p for r", {"color": COLOURS[_OURS], "ls": ":"})
    axes.set_title(f"K down = {sent.k_down}", fontsize=10)
    axes.set_xlabel("r, weight of the downlink")
    axes.set_ylabel("(1 − r) up + r down, thousand coordinates")
    _logarithmic(axes)


def _draw_points(
    axes: Any, points: Sequence[tuple[float, Spread]], label: str, style: dict[str, Any]
) -> None:
    """Draw means in thousands, with their deviations."""
    if points:
        xs = [x for x, _ in points]
        means = [own.mean / _THOUSAND for _, own in points]
        deviations = [own.deviation / _THOUSAND for _, own in points]
        axes.errorbar(xs, means, deviations, marker="o", ms=4, capsize=3, label=label, **style)


def draw_scaling(path: Path, *, quick: bool = False) -> None:
    """Draw the iterations of each sweep, and the theory's lines through their middle."""
    rows, drawn = read_rows(path), sweeps(quick=quick)
    figure, panels = _subplots(1, len(drawn), (5.4, 4.6))
    for axes, sweep in zip(panels[0], drawn, strict=True):
        for method in sweep.methods:
            _draw_sweep(axes, sweep, method, rows)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(sweep.label)
        axes.grid(True, which="both", alpha=0.2)
        axes.legend(fontsize=8)
    panels[0][0].set_ylabel("iterations until f − f* has fallen to 1e-4 of its start")
    figure.suptitle(
        f"Iterations on quadratics (d = {D}), and the theory's terms times one constant (dashed)\n"
        f"mean and deviation of {_seeds(rows)}; slope ± deviation (slope of the theory)"
    )
    save_figure(figure, path.with_suffix(".png"), dpi=80)


def _draw_sweep(axes: Any, sweep: Sweep, method: str, rows: Sequence[Row]) -> None:
    own = counts(sweep, method, rows)
    if not own:
        return
    found, xs = exponent(sweep, method, rows), [sweep.x(point) for point in sweep.points]
    by_point = [spread(counted) for counted in zip(*own.values(), strict=True)]
    means = [each.mean for each in by_point]
    deviations = [each.deviation for each in by_point]
    label = f"{method}: {found.measured.with_deviation(2)} ({found.theory:.2f})"
    if len(own) < len({row.seed for row in rows}):
        label += f", {len(own)} seeds"
    axes.errorbar(xs, means, deviations, marker="o", capsize=3, label=label, color=COLOURS[method])
    theory = [THEORY[method](point) for point in sweep.points]
    # Theory leaves the constant open: draw its line through the middle point.
    middle = len(xs) // 2
    factor = means[middle] / theory[middle]
    axes.plot(xs, [factor * each for each in theory], "--", color=COLOURS[method], alpha=0.7)


def draw_winners(path: Path) -> None:
    """Draw the map of winners: condition number by omega, for each n and price."""
    rows = read_rows(path)
    ns = sorted({row.n for row in rows})
    figure, panels = _subplots(len(ns), len(MAP_PRICES), (4.6, 3.7))
    for n, line in zip(ns, panels, strict=True):
        for r, axes in zip(MAP_PRICES, line, strict=True):
            _draw_map(axes, [row for row in rows if row.n == n], priced(r))
            axes.set_title(f"n = {n}, r = {r:g}")
        line[0].set_ylabel("omega of RandK")
    for axes in panels[-1]:
        axes.set_xlabel("condition number L/mu")
    figure.suptitle(
        f"2Direction pays least in {_wins(rows)}. Cells: the method that pays least, and how many "
        "times more the second pays\n(in brackets 2Direction, if it is neither). "
        f"Price (1 − r) up + r down; quadratics, d = {D}; means of {_seeds(rows)}"
    )
    save_figure(figure, path.with_suffix(".png"), dpi=80)


def _wins(rows: Sequence[Row]) -> str:
    """Return in how many cells of the map 2Direction pays least."""
    settings = {row.shared for row in rows}
    ranked = [
        cheapest([row for row in rows if row.shared == shared], METHODS, priced(r))
        for shared in settings
        for r in MAP_PRICES
    ]
    return f"{sum(each[0][0] == _OURS for each in ranked if each)} of {len(ranked)} cells"


def _draw_map(axes: Any, rows: Sequence[Row], cost: Cost) -> None:
    mus = sorted({row.mu for row in rows}, reverse=True)
    ks = sorted({row.k_up for row in rows}, reverse=True)
    for i, mu in enumerate(mus):
        for j, k in enumerate(ks):
            own = [row for row in rows if (row.mu, row.k_up) == (mu, k)]
            ranked = cheapest(own, METHODS, cost)
            if not ranked:
                continue
            (best, least), second = ranked[0], ranked[1] if len(ranked) > 1 else None
            text = _SHORT.get(best, best) + (f"\n{second[1] / least:.2f}x" if second else "")
            times = second and ratio(select(own, second[0]), select(own, best), cost)
            if second and times and tie(times):
                text += f",\na tie with\n{_SHORT.get(second[0], second[0])}"
            ours = dict(ranked).get(_OURS)
            if ours and _OURS not in {best, second and second[0]}:
                text += f" ({ours / least:.2f}x)"
            square = (i - 0.5, j - 0.5)
            axes.add_patch(_rectangle(square, COLOURS[best]))
            axes.text(i, j, text, ha="center", va="center", fontsize=8)
    axes.set_xlim(-0.5, len(mus) - 0.5)
    axes.set_ylim(-0.5, len(ks) - 0.5)
    axes.set_xticks(range(len(mus)), [f"{1 / mu:,.0f}" for mu in mus])
    axes.set_yticks(range(len(ks)), [f"{D / k - 1:g}" for k in ks])


def _rectangle(corner: tuple[float, float], colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, 1, 1, facecolor=colour, alpha=0.35, edgecolor="white")


def _subplots(rows: int, columns: int, size: tuple[float, float], **options: Any) -> Any:
    """Return a figure and a matrix of its panels, each of this size in inches."""
    figsize = (columns * size[0], rows * size[1] + 1)
    return pyplot().subplots(
        rows, columns, figsize=figsize, layout="constrained", squeeze=False, **options
    )


def _logarithmic(axes: Any) -> None:
    """Make the vertical axis logarithmic, with numbers instead of powers of ten."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_locator(pyplot().LogLocator(subs=(2, 5)))
    axes.grid(True, which="both", alpha=0.2)


def _style(method: str) -> dict[str, Any]:
    # Thick lines are the methods of the paper.
    width = 2.2 if method in PAPER else 1.2
    return {"color": COLOURS[method], "linewidth": width}


def _seeds(rows: Sequence[Row]) -> str:
    count = len({row.seed for row in rows if row.reached})
    return f"{count} seeds" if count > 1 else "one seed"
