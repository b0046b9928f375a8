"""The tables of the pages, from the committed results."""

from collections.abc import Callable, Iterable
from pathlib import Path

from recipes.rows import (
    Row,
    Spread,
    by_seed,
    distinct,
    grouped,
    over_seeds,
    read_rows,
    spread,
    where,
)
from recipes.tables import TableMaker, markdown_table, table
from recipes.two_direction.contest import MUS, PAPER, WORKERS
from recipes.two_direction.methods import METHODS
from recipes.two_direction.quadratics import MAP, PRICES, Sweep, exponents, sweeps
from recipes.two_direction.quadratics import D as QUADRATICS_D

OURS = "2Direction"
Cost = Callable[[Row], float]
"""What a run cost: coordinates, bytes or iterations."""


def thousands(row: Row) -> float:
    return float(row["up"] + row["down"]) / 1000


def megabytes(row: Row) -> float:
    return float(row["bytes_up"] + row["bytes_down"]) / 1e6


def priced(r: float, unit: str = "") -> Cost:
    """Return the cost at a price r of the downlink, in coordinates or in ``"bytes_"``."""
    return lambda row: float((1 - r) * row[f"{unit}up"] + r * row[f"{unit}down"])


def reached(rows: list[Row], cost: Cost) -> Spread | None:
    """Return the cost over the seeds, or None unless all runs reached the gap."""
    return over_seeds(rows, cost) if rows and all(row["reached"] for row in rows) else None


def ratio(ours: list[Row], theirs: list[Row], cost: Cost) -> Spread | None:
    """Return how many times more ``ours`` cost than ``theirs``, seed by seed."""
    if reached(ours, cost) is None or reached(theirs, cost) is None:
        return None
    least = by_seed(theirs, cost)
    found = [own / least[seed] for seed, own in by_seed(ours, cost).items() if seed in least]
    return spread(found) if found else None


def tie(times: Spread) -> bool:
    """Return whether a ratio differs from 1 by at most two standard errors."""
    return abs(times.mean - 1) <= 2 * times.error


def cheapest(rows: list[Row], methods: Iterable[str], cost: Cost) -> list[tuple[str, float]]:
    """Return the methods that reached the gap with all seeds and their mean costs, in order."""
    spreads = {method: reached(where(rows, method=method), cost) for method in methods}
    means = {method: own.mean for method, own in spreads.items() if own is not None}
    return sorted(means.items(), key=lambda item: item[1])


def _cost(rows: list[Row], cost: Cost, digits: int = 1) -> str:
    if found := reached(rows, cost):
        return found.with_deviation(digits)
    arrived = where(rows, reached=True)
    if arrived:
        return f"{len(arrived)} of {len(rows)} seeds"
    return f"over {max(map(cost, rows)):.{digits}f}" if rows else "not run"


def _contest(results: Path) -> list[Row]:
    return [row for n in WORKERS for row in read_rows(results / f"contest_digits_n{n}.csv")]


def _costs(n: int, methods: Iterable[str], cost: Cost, digits: int = 1) -> TableMaker:
    def made(results: Path) -> str:
        rows = read_rows(results / f"contest_digits_n{n}.csv")
        columns: dict[str, Callable[[str], str]] = {"": lambda method: method}
        for mu in MUS:
            columns[f"mu = {mu:g}"] = lambda method, mu=mu: _cost(
                where(rows, method=method, mu=mu), cost, digits
            )
        return table(columns, methods)

    return made


def _ranking(results: Path) -> str:
    rows = _contest(results)
    columns: dict[str, Callable[[list[Row]], object]] = {
        "n": lambda own: own[0]["n"],
        "mu": lambda own: f"{own[0]['mu']:g}",
        "fewest coordinates": lambda own: _best(own, thousands),
        "fewest bytes": lambda own: _best(own, megabytes),
    }
    for rival in PAPER[1:]:
        columns[f"coordinates, against {rival}"] = lambda own, rival=rival: _more(
            own, rival, thousands
        )
    columns["bytes, against AGD, three sequences"] = lambda own: _more(own, PAPER[2], megabytes)
    return table(columns, [where(rows, n=n, mu=mu) for n in WORKERS for mu in MUS])


def _best(rows: list[Row], cost: Cost) -> str:
    """Return the cheapest method, and those that no more than two standard errors separate."""
    ranked = [method for method, _ in cheapest(rows, METHODS, cost)]
    if not ranked:
        return "none"
    least = where(rows, method=ranked[0])
    ratios = {method: ratio(where(rows, method=method), least, cost) for method in ranked[1:]}
    return " or ".join([ranked[0], *(name for name, own in ratios.items() if own and tie(own))])


def _more(rows: list[Row], rival: str, cost: Cost) -> str:
    """Return how much more 2Direction sends than a rival, in percent, paired by seed."""
    times = ratio(where(rows, method=OURS), where(rows, method=rival), cost)
    if times is None:
        return "not all runs reached the gap"
    more = Spread(100 * (times.mean - 1), 100 * times.deviation, times.count)
    return f"{more.with_error(1)} %"


def _cells_of_map(results: Path) -> list[tuple[list[Row], str, float, Spread | None]]:
    """Return rows, best rival and price of each cell, and the rival's cost divided by ours."""
    found = []
    for rows in grouped(read_rows(results / "winners.csv"), "n", "mu", "k_up").values():
        for r in PRICES:
            rivals = [method for method in MAP if method != OURS]
            (rival, _), *_ = cheapest(rows, rivals, priced(r))
            ours, theirs = (where(rows, method=method) for method in (OURS, rival))
            found.append((rows, rival, r, ratio(theirs, ours, priced(r))))
    return found


def _place(rows: list[Row]) -> list[object]:
    row = rows[0]
    return [row["n"], f"{1 / row['mu']:,.0f}", f"{QUADRATICS_D / row['k_up'] - 1:g}"]


def _times(own: Spread | None) -> str:
    return f"{own.mean:.2f} ± {own.error:.2f}" if own else "over budget"


def _map(results: Path) -> str:
    """Return what the best rival pays, divided by what 2Direction pays, with many workers."""
    lines: dict[tuple[object, ...], list[object]] = {}
    for rows, rival, _, times in _cells_of_map(results):
        if rows[0]["n"] == max(distinct(read_rows(results / "winners.csv"), "n")):
            cells = lines.setdefault(tuple(_place(rows)), _place(rows))
            cells.append(f"{_times(times)} ({rival})")
    return markdown_table(["n", "L/mu", "omega", *(f"r = {r:g}" for r in PRICES)], lines.values())


def _wins(results: Path) -> str:
    """Return where 2Direction pays least, or as little as the cheapest, of the map's cells."""
    lines = []
    for rows, rival, r, times in _cells_of_map(results):
        if times is not None and (times.mean > 1 or tie(times)):
            ours, theirs = (where(rows, method=method) for method in (OURS, rival))
            in_bytes = ratio(theirs, ours, priced(r, "bytes_"))
            both = [f"{_times(each)} times as much" for each in (times, in_bytes)]
            lines.append([*_place(rows), f"{r:g}", rival, *both])
    header = ["n", "L/mu", "omega", "r", "best rival", "it pays, in coordinates", "in bytes"]
    return markdown_table(header, lines)


def _scaling(results: Path) -> str:
    rows = read_rows(results / "scaling.csv")

    def measured(each: tuple[Sweep, str]) -> str:
        own, seeds = exponents(*each, rows)[0], len(distinct(rows, "seed"))
        return own.with_deviation() + (
            "" if own.count == seeds else f" ({own.count} of {seeds} seeds)"
        )

    columns: dict[str, Callable[[tuple[Sweep, str]], object]] = {
        "iterations by": lambda each: each[0].label,
        "range": lambda each: f"{each[0].xs()[0]:g} to {each[0].xs()[-1]:g}",
        "method": lambda each: each[1],
        "exponent": measured,
        "theory": lambda each: f"{exponents(*each, rows)[1]:.2f}",
    }
    return table(columns, [(sweep, method) for sweep in sweeps() for method in sweep.methods])


TABLES: dict[str, TableMaker] = {
    "paper_10": _costs(10, PAPER, thousands),
    "coordinates_10": _costs(10, METHODS, thousands),
    "coordinates_100": _costs(100, METHODS, thousands),
    "megabytes_10": _costs(10, PAPER, megabytes, 2),
    "megabytes_100": _costs(100, PAPER, megabytes, 2),
    "ranking": _ranking,
    "map": _map,
    "wins": _wins,
    "scaling": _scaling,
}
