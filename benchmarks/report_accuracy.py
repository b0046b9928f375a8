"""Time to accuracy and overhead on the loopback, as medians over the runs in the CSV files."""

import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from benchmarks.net.names import BASELINES, PLAIN
from benchmarks.report_data import Row, read


@dataclass(frozen=True)
class Reached:
    """A method on a link, at its fastest learning rate."""

    method: str
    mbit: int
    lr: float
    seconds: float
    steps: float
    megabytes: float
    runs: int
    missed: int


def times_to_accuracy(path: Path) -> list[Reached]:
    """The result of every method and link at the best learning rate that was tried."""
    runs: dict[tuple[int, str, float], dict[str, Row]] = defaultdict(dict)
    for row in read(path):
        runs[int(row["mbit"]), row["method"], float(row["rate"])][row["seed"]] = row
    best: dict[tuple[int, str], Reached] = {}
    for (mbit, method, lr), rows in runs.items():
        found = _reached(method, mbit, lr, list(rows.values()))
        known = best.get((mbit, method))
        # A run that misses the target stops at the end of its schedule. Its time is a lower bound,
        # so compare the number of such runs before the time.
        if known is None or (found.missed, found.seconds) < (known.missed, known.seconds):
            best[mbit, method] = found
    return sorted(best.values(), key=_order)


def _order(reached: Reached) -> tuple[int, int]:
    known = reached.method in BASELINES
    return reached.mbit, BASELINES.index(reached.method) if known else len(BASELINES)


def _reached(method: str, mbit: int, lr: float, rows: list[Row]) -> Reached:
    def median_of(name: str) -> float:
        return statistics.median(float(row[name]) for row in rows)

    missed = sum(row["reached"] != "True" for row in rows)
    megabytes = median_of("payload_bytes") / 1e6
    return Reached(
        method, mbit, lr, median_of("seconds"), median_of("steps"), megabytes, len(rows), missed
    )


# By (model, batch) and method: the ratios of all rounds.
Ratios = dict[tuple[str, int], dict[str, list[float]]]


def loopback_ratios(path: Path, to: str = PLAIN) -> Ratios:
    """Step times divided by that of another method, for every round."""
    rounds: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in read(path):
        key = row["model"], int(row["batch"])
        rounds[key][row["method"]].append(float(row["step_ms"]))
    # Divide round by round: a change in the machine's load then affects both times.
    # strict=False: an interrupted run can leave its last round incomplete.
    return {
        key: {
            method: [own / other for own, other in zip(times, methods[to], strict=False)]
            for method, times in methods.items()
        }
        for key, methods in rounds.items()
        if to in methods
    }
