"""Pictures of the parts, drawn from their CSV files."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from recipes.pictures import Line, Panel, Picture, draw, spreads
from recipes.rows import Row, Spread, distinct, read_rows, where
from recipes.two_direction.contest import PAPER
from recipes.two_direction.methods import METHODS
from recipes.two_direction.tables import reached, thousands

# Every method has the same colour in all pictures.
COLOURS = {method: f"C{index}" for index, method in enumerate(METHODS)}
_TRAFFIC = "thousand coordinates, up and down"


def contest(name: str, folder: Path, path: Path) -> None:
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


def picture(name: str) -> Picture:
    return partial(contest, name)


PICTURES = {name: picture(name) for name in ("contest_digits_n10", "contest_digits_n100")}
