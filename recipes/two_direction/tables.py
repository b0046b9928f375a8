"""The tables of the pages, from the committed results."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from recipes.page_tables import TableMaker, markdown_table
from recipes.result_files import read_csv
from recipes.spread import Spread
from recipes.two_direction.contest import MUS, PAPER, WORKERS
from recipes.two_direction.methods import METHODS, Messages
from recipes.two_direction.outcomes import (
    Cost,
    by_seed,
    cheapest,
    coordinates,
    megabytes,
    over_seeds,
    priced,
    priced_bytes,
    ratio,
    read_rows,
    select,
    tie,
)
from recipes.two_direction.race import Row
from recipes.two_direction.scaling import exponent, sweeps
from recipes.two_direction.sweeps import DIGITS_D, K_DOWNS, K_UP, PRICED_K_DOWNS, PRICES, chance
from recipes.two_direction.winners import PRICES as MAP_PRICES
from recipes.two_direction.winners import D as QUADRATICS_D

REFERENCE = {
    (1e-4, "2Direction"): 333_125,
    (1e-4, "AGD"): 523_900,
    (1e-4, "EF21-P + DIANA"): 832_000,
    (1e-3, "2Direction"): 188_695,
    (1e-3, "AGD"): 195_000,
    (1e-3, "AGD, three sequences"): 178_100,
    (1e-3, "EF21-P + DIANA"): 168_350,
    (1e-2, "2Direction"): 104_650,
    (1e-2, "AGD"): 79_300,
    (1e-2, "EF21-P + DIANA"): 34_450,
}
"""Coordinates of one run of programs that are not part of this repository, with n = 10."""

_OURS = "2Direction"
_THOUSAND = 1000


def _contest(results: Path) -> list[Row]:
    return [row for n in WORKERS for row in read_rows(results / f"contest_digits_n{n}.csv")]


def _thousands(row: Row) -> float:
    return row.total / _THOUSAND


def _costs(n: int, methods: Iterable[str], cost: Cost, digits: int) -> TableMaker:
    def table(results: Path) -> str:
        rows = _contest(results)
        lines = [
            [method, *(_cost(select(rows, method, n=n, mu=mu), cost, digits) for mu in MUS)]
            for method in methods
        ]
        return markdown_table(["", *(f"mu = {mu:g}" for mu in MUS)], lines)

    return table


def _cost(rows: list[Row], cost: Cost, digits: int) -> str:
    found = over_seeds(rows, cost)
    if found is not None:
        return found.with_deviation(digits)
    reached = by_seed(rows, cost)
    if reached:
        return f"{len(reached)} of {len(rows)} seeds"
    most = max((cost(row) for row in rows), default=None)
    return "not run" if most is None else f"over {most:.{digits}f}"


def _ranking(results: Path) -> str:
    """Return who sends least, and how much more 2Direction sends than each rival."""
    rows, lines = _contest(results), []
    for n in WORKERS:
        for mu in MUS:
            own = [row for row in rows if (row.n, row.mu) == (n, mu)]
            lines.append(
                [
                    n,
                    f"{mu:g}",
                    *(_best(own, cost) for cost in (coordinates, megabytes)),
                    *(_more(own, rival, coordinates) for rival in PAPER[1:]),
                    _more(own, "AGD, three sequences", megabytes),
                ]
            )
    header = ["n", "mu", "fewest coordinates", "fewest bytes"]
    rivals = [f"coordinates, against {rival}" for rival in PAPER[1:]]
    return markdown_table([*header, *rivals, "bytes, against AGD, three sequences"], lines)


def _best(rows: list[Row], cost: Cost) -> str:
    """Return the cheapest method, and those that no more than two standard errors separate."""
    ranked = [method for method, _ in cheapest(rows, METHODS, cost)]
    if not ranked:
        return "none"
    least = select(rows, ranked[0])
    ratios = {method: ratio(select(rows, method), least, cost) for method in ranked[1:]}
    return " or ".join([ranked[0], *(name for name, own in ratios.items() if own and tie(own))])


def _more(rows: list[Row], rival: str, cost: Cost) -> str:
    """Return how much more 2Direction sends than a rival, in percent, paired by seed."""
    times = ratio(select(rows, _OURS), select(rows, rival), cost)
    if times is None:
        return "not all runs reached the gap"
    more = Spread(100 * (times.mean - 1), 100 * times.deviation, times.count)
    return f"{more.with_error(1)} %"


def _reference(results: Path) -> str:
    rows = _contest(results)
    lines = []
    for (mu, method), theirs in REFERENCE.items():
        ours = over_seeds(select(rows, method, n=10, mu=mu), _thousands)
        assert ours is not None
        lines.append([f"{mu:g}", method, ours.with_deviation(1), f"{theirs / _THOUSAND:.1f}"])
    return markdown_table(["mu", "method", "here", "other program"], lines)


def _sizes(results: Path) -> str:
    rows = read_rows(results / "alpha.csv")
    lines = [
        [
            f"{k / DIGITS_D:.2f}",
            *(
                _cost(select(rows, method, k_down=k, p=0.0), _thousands, 1)
                for method in (_OURS, "EF21-P + DIANA")
            ),
        ]
        for k in K_DOWNS
    ]
    return markdown_table(["K down / d", _OURS, "EF21-P + DIANA"], lines)


def _prices(results: Path) -> str:
    rows, lines = read_rows(results / "alpha.csv"), []
    for k_down in PRICED_K_DOWNS:
        for r in PRICES:
            for_r = chance(Messages(K_UP, k_down), r)
            p, cost = for_r.p if for_r else 0.0, _in_thousands(priced(r))
            cells = [
                _cost(select(rows, _OURS, k_down=k_down, p=0.0), cost, 1),
                _cost(select(rows, _OURS, k_down=k_down, p=p), cost, 1),
                _cost(select(rows, "EF21-P + DIANA", k_down=k_down), cost, 1),
                _cost(select(rows, "AGD, three sequences"), cost, 1),
            ]
            lines.append([k_down, f"{r:g}", f"{p:.3f}" if p else "default", *cells])
    header = ["K down", "r", "p for r", "2Direction, default p", "2Direction, p for r"]
    return markdown_table([*header, "EF21-P + DIANA", "AGD, three sequences"], lines)


def _in_thousands(cost: Cost) -> Cost:
    return lambda row: cost(row) / _THOUSAND


def _wins(results: Path) -> str:
    """Return where 2Direction pays least, or as little as the cheapest, of the map's cells."""
    rows, lines = read_rows(results / "winners.csv"), []
    for shared in dict.fromkeys(row.shared for row in rows):
        own = [row for row in rows if row.shared == shared]
        for r in MAP_PRICES:
            names = [method for method, _ in cheapest(own, PAPER, priced(r))]
            rival = next(name for name in names if name != _OURS)
            ours, theirs = select(own, _OURS), select(own, rival)
            times = ratio(theirs, ours, priced(r))
            if times is None or (names[0] != _OURS and not tie(times)):
                continue
            in_bytes = ratio(theirs, ours, priced_bytes(r))
            assert in_bytes is not None
            found = own[0]
            omega = QUADRATICS_D / found.k_up - 1
            place = [found.n, f"{1 / found.mu:,.0f}", f"{omega:g}", f"{r:g}", rival]
            lines.append([*place, _times(times), _times(in_bytes)])
    header = ["n", "L/mu", "omega", "r", "best rival", "it pays, in coordinates", "in bytes"]
    return markdown_table(header, lines)


def _times(own: Spread) -> str:
    return f"{own.mean:.2f} ± {own.error:.2f} times as much"


def _scaling(results: Path) -> str:
    rows, lines = read_rows(results / "scaling.csv"), []
    for sweep in sweeps():
        for method in sweep.methods:
            found = exponent(sweep, method, rows)
            seeds = len({row.seed for row in rows})
            measured = found.measured.with_deviation(2)
            if found.measured.count < seeds:
                measured += f" ({found.measured.count} of {seeds} seeds)"
            xs = [sweep.x(point) for point in sweep.points]
            span = f"{xs[0]:g} to {xs[-1]:g}"
            lines.append([sweep.label, span, method, measured, f"{found.theory:.2f}"])
    return markdown_table(["iterations by", "range", "method", "exponent", "theory"], lines)


def _ranks(results: Path) -> str:
    columns = ("received_by_rank", "bytes_down", "bytes_up")
    lines = [
        [row["method"], *(f"{int(row[name]) / 1e6:.2f}" for name in columns)]
        for row in read_csv(results / "on_ranks.csv")
    ]
    header = ["MB", "received by a rank", "received from a server", "messages of one worker"]
    return markdown_table(header, lines)


TABLES: Mapping[str, Callable[[Path], str]] = {
    "paper_10": _costs(10, PAPER, _thousands, 1),
    "coordinates_10": _costs(10, METHODS, _thousands, 1),
    "coordinates_100": _costs(100, METHODS, _thousands, 1),
    "megabytes_10": _costs(10, PAPER, megabytes, 2),
    "megabytes_100": _costs(100, PAPER, megabytes, 2),
    "ranking": _ranking,
    "reference": _reference,
    "sizes": _sizes,
    "prices": _prices,
    "wins": _wins,
    "scaling": _scaling,
    "ranks": _ranks,
}
