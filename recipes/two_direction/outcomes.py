"""What the rows of a table say: costs by seed and their spread."""

from collections.abc import Callable, Iterable
from pathlib import Path

from recipes.result_files import read_csv
from recipes.spread import Spread, spread
from recipes.two_direction.race import Row

Cost = Callable[[Row], float]
"""What a run cost: coordinates, bytes or iterations."""


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a table's file."""
    return [Row.read(row) for row in read_csv(path)]


def coordinates(row: Row) -> float:
    """Return the coordinates of a run, up and down."""
    return row.total


def megabytes(row: Row) -> float:
    """Return the traffic of a run in MB, up and down."""
    return (row.bytes_up + row.bytes_down) / 1e6


def priced(r: float) -> Cost:
    """Return the cost at a price of the downlink: (1 - r) up + r down coordinates."""
    return lambda row: (1 - r) * row.up + r * row.down


def priced_bytes(r: float) -> Cost:
    """Return the same in bytes: (1 - r) up + r down."""
    return lambda row: (1 - r) * row.bytes_up + r * row.bytes_down


def select(rows: Iterable[Row], method: str, **wanted: object) -> list[Row]:
    """Return the rows of a method whose columns have these values."""
    return [
        row
        for row in rows
        if row.method == method
        and all(getattr(row, name) == value for name, value in wanted.items())
    ]


def by_seed(rows: Iterable[Row], cost: Cost) -> dict[int, float]:
    """Return the costs of the runs that reached the gap, by seed."""
    return {row.seed: cost(row) for row in rows if row.reached}


def over_seeds(rows: list[Row], cost: Cost) -> Spread | None:
    """Return the cost over the seeds, or None unless all runs reached the gap."""
    reached = by_seed(rows, cost)
    return spread(reached.values()) if rows and len(reached) == len(rows) else None


def ratio(ours: list[Row], theirs: list[Row], cost: Cost) -> Spread | None:
    """Return how many times more ``ours`` cost than ``theirs``, seed by seed.

    None unless all runs of both reached the gap, with a seed in common.
    """
    if over_seeds(ours, cost) is None or over_seeds(theirs, cost) is None:
        return None
    least = by_seed(theirs, cost)
    found = {seed: own / least[seed] for seed, own in by_seed(ours, cost).items() if seed in least}
    return spread(found.values()) if found else None


def tie(times: Spread) -> bool:
    """Return whether a ratio differs from 1 by at most two standard errors."""
    return abs(times.mean - 1) <= 2 * times.error


def cheapest(rows: list[Row], methods: Iterable[str], cost: Cost) -> list[tuple[str, float]]:
    """Return the methods that reached the gap with all seeds and their mean costs, in order."""
    spreads = {
        method: over_seeds([row for row in rows if row.method == method], cost)
        for method in methods
    }
    means = {method: own.mean for method, own in spreads.items() if own is not None}
    return sorted(means.items(), key=lambda item: item[1])
