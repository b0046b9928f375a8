"""Pictures of the parts, drawn from their CSV files."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from recipes.pictures import Cells, Line, Panel, draw, spreads
from recipes.rows import Row, distinct, read_rows, where
from recipes.spread import Spread
from recipes.two_direction.contest import PAPER
from recipes.two_direction.methods import METHODS
from recipes.two_direction.quadratics import MAP_PRICES, D
from recipes.two_direction.tables import (
    OURS,
    Cost,
    cheapest,
    priced,
    ratio,
    reached,
    thousands,
    tie,
)

# Every method has the same colour in all pictures.
COLOURS = {method: f"C{index}" for index, method in enumerate(METHODS)}
_TRAFFIC = "thousand coordinates, up and down"
# The map's text must fit into its cells.
_SHORT = {"AGD, three sequences": "AGD 3-seq.", "EF21-P + DIANA": "EF21-P+\nDIANA"}


def contest(name: str, folder: Path, path: Path) -> None:
    """Draw the coordinates by mu, and the gap against coordinates for each mu."""
    rows, curves = read_rows(folder / f"{name}.csv"), read_rows(folder / f"{name}_curves.csv")
    mus = sorted(distinct(rows, "mu"))
    gaps = {row["mu"]: row["gap"] for row in rows}

    def of(method: str, mu: float, gap: float) -> list[Row]:
        return where(rows, method=method, mu=mu, gap=gap)

    first = Panel(
        x="regulariser mu",
        y=_TRAFFIC,
        lines=[
            # No line joins points of different gaps.
            _line(method, {x: own for x, mu in enumerate(mus) if (own := of(method, mu, gap))})
            for method in METHODS
            for gap in distinct(rows, "gap")
        ],
        log="y",
        xticks={x: f"{mu:g}\ngap {gaps[mu]:g}" for x, mu in enumerate(mus)},
    )
    panels = [_gap(where(rows, mu=mu), where(curves, mu=mu)) for mu in mus]
    title = (
        f"Coordinates of a worker until f − f* is at most the gap, n = {rows[0]['n']}\n"
        f"Left: mean and deviation of {_seeds(rows)}. Others: one seed, until the slowest of the "
        "thick lines reaches the gap"
    )
    draw(path, title, [first, *panels], size=(4, 3.8), columns=8)


def _gap(rows: Sequence[Row], curves: Sequence[Row]) -> Panel:
    gap = rows[0]["gap"]
    ends = [thousands(row) for row in where(rows, reached=True) if row["method"] in PAPER]
    return Panel(
        x=_TRAFFIC,
        y="f − f*",
        title=f"mu = {rows[0]['mu']:g}",
        lines=[
            Line(
                method,
                [point["total"] / 1000 for point in own],
                [max(point["gap"], gap / 10) for point in own],
                style=_style(method),
            )
            for method in METHODS
            if (own := where(curves, method=method))
        ],
        log="y",
        xlim=(0, 1.05 * max(ends, default=1000.0)),
        ylim=(gap / 2, None),
    )


def winners(folder: Path, path: Path) -> None:
    """Draw the map of winners: condition number by omega, for each n and price."""
    rows = read_rows(folder / "winners.csv")
    panels = [
        [_map(where(rows, n=n), r, f"n = {n}, r = {r:g}") for r in MAP_PRICES]
        for n in sorted(distinct(rows, "n"))
    ]
    title = (
        "Cells: the method that pays least, and how many times more the second pays (in brackets "
        f"2Direction, if it is neither)\nPrice (1 − r) up + r down; quadratics, d = {D}; means of "
        f"{_seeds(rows)}"
    )
    draw(path, title, *panels, size=(4.6, 3.7))


def _map(rows: list[Row], r: float, title: str) -> Panel:
    mus = sorted(distinct(rows, "mu"), reverse=True)
    ks = sorted(distinct(rows, "k_up"), reverse=True)
    found = [[_cell(where(rows, mu=mu, k_up=k), priced(r)) for mu in mus] for k in ks]
    values = [[COLOURS[best] if best else "white" for best, _ in line] for line in found]
    return Panel(
        x="condition number L/mu",
        y="omega of RandK",
        title=title,
        cells=Cells(values, [[text for _, text in line] for line in found]),
        xticks={x: f"{1 / mu:,.0f}" for x, mu in enumerate(mus)},
        yticks={y: f"{D / k - 1:g}" for y, k in enumerate(ks)},
    )


def _cell(rows: list[Row], cost: Cost) -> tuple[str, str]:
    """Return the cheapest method of a cell of the map, and its text."""
    ranked = cheapest(rows, METHODS, cost)
    if not ranked:
        return "", ""
    best, least = ranked[0]
    text, second = _SHORT.get(best, best), ""
    if len(ranked) > 1:
        second, pays = ranked[1]
        text += f"\n{pays / least:.2f}x"
        times = ratio(where(rows, method=second), where(rows, method=best), cost)
        if times and tie(times):
            text += f",\na tie with\n{_SHORT.get(second, second)}"
    ours = dict(ranked).get(OURS)
    if ours and OURS not in (best, second):
        text += f" ({ours / least:.2f}x)"
    return best, text


def _line(method: str, groups: Mapping[float, list[Row]], **more: Any) -> Line:
    costs = {x: reached(rows, thousands) for x, rows in groups.items()}
    return _means(method, costs, **_style(method), **more)


def _means(label: str, costs: Mapping[float, Spread | None], **style: Any) -> Line:
    found = {x: cost for x, cost in costs.items() if cost}
    return spreads(label if found else "_", found, marker="o", **style)


def _style(method: str) -> dict[str, Any]:
    # Thick lines are the methods of the paper.
    return {"color": COLOURS[method], "linewidth": 2.2 if method in PAPER else 1.2}


def _seeds(rows: list[Row]) -> str:
    count = len(distinct(where(rows, reached=True), "seed"))
    return f"{count} seeds" if count > 1 else "one seed"


PICTURES = {
    "contest_digits_n10": partial(contest, "contest_digits_n10"),
    "contest_digits_n100": partial(contest, "contest_digits_n100"),
    "winners": winners,
}
