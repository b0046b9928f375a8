"""The figures that the pages show, from the rows of the CSV files."""

import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.net.names import BASELINES, BF16, FLOOR, PLAIN

Row = dict[str, str]
Link = tuple[str, int, int]
"""A model, a number of hosts and the Mbit/s between them."""

CLOSE = 1.05
"""A chosen method whose step takes at most this many times as long as the best is a good choice."""


_DEFAULT = ', selection="shard"'
"""Written out in rows from before it became the default."""


def read(path: Path) -> list[Row]:
    """The rows of a file; none if it does not exist."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            {name: text.replace(_DEFAULT, "") for name, text in row.items()}
            for row in csv.DictReader(file)
        ]


def latest(path: Path, *names: str) -> list[Row]:
    """The last row of each set-up, which the columns `names` identify: programs append rows."""
    return list({tuple(row[name] for name in names): row for row in read(path)}.values())


def in_order(methods: Iterable[str]) -> list[str]:
    """Each method once: baselines first, then specs in the order in which they came."""
    found = dict.fromkeys(methods)
    return [m for m in BASELINES if m in found] + [m for m in found if m not in BASELINES]


# --- Steps on shaped links ------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """The milliseconds of a step, divided into four parts."""

    compute: float
    encode: float
    sockets: float
    wait: float


class Steps:
    """The rows of network.csv by link and method."""

    def __init__(self, path: Path) -> None:
        self._rows = read(path)
        self._by_link: dict[Link, dict[str, Row]] = defaultdict(dict)
        for row in self._rows:
            link = row["model"], int(row["hosts"]), int(row["mbit"])
            self._by_link[link][row["method"]] = row
        self.methods = in_order(row["method"] for row in self._rows)
        self.models = sorted({model for model, _, _ in self._by_link})
        self.hosts = sorted({hosts for _, hosts, _ in self._by_link})
        self.speeds = sorted({mbit for _, _, mbit in self._by_link})

    def milliseconds(self, link: Link, method: str) -> float | None:
        row = self._by_link.get(link, {}).get(method)
        return float(row["step_ms"]) if row else None

    def relative(self, link: Link, method: str) -> float | None:
        """The step time, divided by that of plain DDP on the same link."""
        own, plain = self.milliseconds(link, method), self.milliseconds(link, PLAIN)
        return own / plain if own and plain else None

    def nbytes(self, column: str, model: str, hosts: int, method: str) -> float | None:
        """A column of bytes per step: the median over the speeds, or None if it is empty."""
        found = [
            float(rows[method][column])
            for link, rows in self._by_link.items()
            if link[:2] == (model, hosts) and method in rows and rows[method][column]
        ]
        return statistics.median(found) if found else None

    def split(self, link: Link, method: str) -> Split | None:
        """Divide a step: what no-op takes is compute; CPU time above that encodes or sends."""
        row = self._by_link.get(link, {}).get(method)
        names = ("step_ms", "user_ms", "system_ms")
        # All its rows, not only the latest: no-op sends nothing, so the link does not matter.
        floors = [
            [
                float(each[name])
                for each in self._rows
                if (each["model"], int(each["hosts"]), each["method"]) == (*link[:2], FLOOR)
            ]
            for name in names
        ]
        if row is None or not floors[0]:
            return None
        step, encode, sockets = (
            max(0.0, float(row[name]) - statistics.median(floor))
            for name, floor in zip(names, floors, strict=True)
        )
        # CPU time is the sum over threads, and can exceed the step.
        wait = max(0.0, step - encode - sockets)
        return Split(float(row["step_ms"]) - step, encode, sockets, wait)


def loopback_ratios(path: Path) -> dict[str, list[float]]:
    """Step times over those of plain DDP in the same round, by method."""
    rounds: dict[str, list[float]] = defaultdict(list)
    for row in read(path):
        rounds[row["method"]].append(float(row["step_ms"]))
    # An interrupted run can leave its last round incomplete.
    return {
        method: [own / plain for own, plain in zip(times, rounds[PLAIN], strict=False)]
        for method, times in rounds.items()
    }


@dataclass(frozen=True)
class Reached:
    """The runs of a method to a target accuracy, at its best learning rate: medians."""

    method: str
    mbit: int
    seconds: float
    steps: float
    missed: int


def times_to_accuracy(path: Path) -> list[Reached]:
    """The result of every method on every link at the best learning rate that was tried."""
    runs: dict[tuple[int, str, str], dict[str, Row]] = defaultdict(dict)
    for row in read(path):
        runs[int(row["mbit"]), row["method"], row["rate"]][row["seed"]] = row
    best: dict[tuple[str, int], Reached] = {}
    for (mbit, method, _), by_seed in runs.items():
        rows = list(by_seed.values())
        seconds, steps = (
            statistics.median(float(row[name]) for row in rows) for name in ("seconds", "steps")
        )
        missed = sum(row["reached"] != "True" for row in rows)
        found = Reached(method, mbit, seconds, steps, missed)
        known = best.get((method, mbit), found)
        # A run that misses the target ends early: compare the number of misses before the time.
        best[method, mbit] = min(known, found, key=lambda each: (each.missed, each.seconds))
    order = in_order(method for method, _ in best)
    return sorted(best.values(), key=lambda each: (each.mbit, order.index(each.method)))


# --- Predictions ----------------------------------------------------------------------------------

Estimate = Callable[[Row], float]


def measured(row: Row) -> float:
    return float(row["step_ms"])


def predicted(row: Row) -> float:
    """The prediction from measured collectives."""
    return float(row["predicted_ms"])


def computed(row: Row) -> float:
    """The prediction from the numbers of the link alone."""
    return float(row["formula_ms"])


def predictions(path: Path) -> list[Row]:
    names = ("hosts", "ranks", "mbit", "delay_us", "model", "batch", "method", "levels")
    return latest(path, *names)


def errors(rows: Iterable[Row], estimate: Estimate = predicted) -> list[float]:
    """The relative error of each prediction, without its sign, ascending."""
    return sorted(abs(estimate(row) / measured(row) - 1) for row in rows)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the ascending `values` does not exceed."""
    return values[math.ceil(share * len(values)) - 1]


@dataclass(frozen=True)
class Choice:
    """The gradient methods with one model on one link: what is chosen, and what is best.

    Attributes:
        rows: by method.
    """

    rows: dict[str, Row]

    def fastest(self, estimate: Estimate) -> str:
        return min(self.rows, key=lambda method: estimate(self.rows[method]))

    @property
    def regret(self) -> float:
        """The measured time of the chosen method, divided by that of the best."""
        chosen, best = (self.rows[self.fastest(each)] for each in (predicted, measured))
        return measured(chosen) / measured(best)

    def gain(self, estimate: Estimate) -> float:
        """The time of the bf16 hook, divided by that of the fastest method that is no baseline."""
        ours = [row for method, row in self.rows.items() if method not in (PLAIN, BF16)]
        return estimate(self.rows[BF16]) / min(map(estimate, ours))


def choices(rows: Iterable[Row]) -> list[Choice]:
    """The choices between the bf16 hook and torchcomp, without local steps."""
    found: dict[tuple[str, ...], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if not row["method"].startswith("every("):
            names = ("hosts", "ranks", "mbit", "delay_us", "model", "batch")
            found[tuple(row[name] for name in names)][row["method"]] = row
    return [Choice(each) for each in found.values() if BF16 in each and set(each) - {PLAIN, BF16}]


def dont(found: Iterable[Choice]) -> tuple[int, int, int]:
    """How often "nothing beats the bf16 hook" was right, wrong, and missed."""
    said = [(each.gain(predicted) <= 1, each.gain(measured) <= 1) for each in found]
    return said.count((True, True)), said.count((True, False)), said.count((False, True))
