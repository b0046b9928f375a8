"""Time to accuracy and the cost on loopback, as medians over the runs of their CSV files."""

import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from net.names import BASELINES, PLAIN
from report_data import Row, read


@dataclass(frozen=True)
class Reached:
    """A method on a link, at the learning rate with which it was fastest."""

    method: str
    mbit: int
    rate: float
    seconds: float
    steps: float
    megabytes: float
    runs: int
    missed: int


def times_to_accuracy(path: Path) -> list[Reached]:
    """The best rate of each method and link; what missed its target in a run counts as slower."""
    runs: dict[tuple[int, str, float], dict[str, Row]] = defaultdict(dict)
    for row in read(path):
        runs[int(row["mbit"]), row["method"], float(row["rate"])][row["seed"]] = row
    best: dict[tuple[int, str], Reached] = {}
    for (mbit, method, rate), rows in runs.items():
        found = _reached(method, mbit, rate, list(rows.values()))
        known = best.get((mbit, method))
        if known is None or (found.missed, found.seconds) < (known.missed, known.seconds):
            best[mbit, method] = found
    return sorted(best.values(), key=_order)


def _order(reached: Reached) -> tuple[int, int]:
    known = reached.method in BASELINES
    return reached.mbit, BASELINES.index(reached.method) if known else len(BASELINES)


def _reached(method: str, mbit: int, rate: float, rows: list[Row]) -> Reached:
    def middle(name: str) -> float:
        return statistics.median(float(row[name]) for row in rows)

    missed = sum(row["reached"] != "True" for row in rows)
    megabytes = middle("payload_bytes") / 1e6
    return Reached(
        method, mbit, rate, middle("seconds"), middle("steps"), megabytes, len(rows), missed
    )


def loopback_ratios(path: Path) -> dict[tuple[str, int], dict[str, list[float]]]:
    """Per (model, batch) and method, the step time over plain DDP's in each round."""
    rounds: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in read(path):
        key = row["model"], int(row["batch"])
        rounds[key][row["method"]].append(float(row["step_ms"]))
    return {
        key: {
            method: [own / plain for own, plain in zip(times, methods[PLAIN], strict=False)]
            for method, times in methods.items()
        }
        for key, methods in rounds.items()
        if PLAIN in methods
    }
