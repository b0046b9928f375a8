"""Result files: one row a run, where they come from, and means over seeds."""

import csv
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

# The recipes are scripts: they import their neighbours as modules beside them.
sys.path.append(str(Path(__file__).resolve().parents[1] / "bidirectional_topk"))

from layer_training import Method, Outcome
from result_files import write_csv

_OUTCOME = ("validation", "test", "bytes_share", "step_ms", "backward_ms", "seconds")
_HEADER = ("kind", "budget", "norm", "rate", "seed", *_OUTCOME)


@dataclass(frozen=True)
class Run:
    """One training run."""

    method: Method
    rate: float
    seed: int
    outcome: Outcome


@dataclass(frozen=True)
class Summary:
    """A method at its best rate, over the seeds."""

    method: Method
    rate: float
    tests: tuple[float, ...]
    bytes_share: float
    backward_ms: float

    @property
    def mean(self) -> float:
        return statistics.mean(self.tests)

    @property
    def deviation(self) -> float:
        return statistics.stdev(self.tests) if len(self.tests) > 1 else 0.0


def start_csv(path: Path) -> None:
    """Begin a table, with the command, the versions and the date as comments above it."""
    write_csv(path, _HEADER, [])


def append_csv(path: Path, run: Run) -> None:
    """Add a run, at once on disk."""
    method, outcome = run.method, run.outcome
    row = [method.kind, method.budget, method.norm, run.rate, run.seed]
    row += [f"{outcome.validation:.3f}", f"{outcome.test:.3f}", f"{outcome.bytes_share:.4f}"]
    row += [f"{outcome.step_ms:.3f}", f"{outcome.backward_ms:.3f}", f"{outcome.seconds:.2f}"]
    with path.open("a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerow(row)


def read_csv(path: Path) -> list[Run]:
    """The runs of a table."""
    with path.open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return [
        Run(
            Method(row["kind"], float(row["budget"]), row["norm"]),
            float(row["rate"]),
            int(row["seed"]),
            Outcome(*(float(row[name]) for name in _OUTCOME)),
        )
        for row in rows
    ]


def summaries(runs: list[Run]) -> list[Summary]:
    """Every method at the rate with the best mean accuracy on held-out images."""
    found = []
    for method in dict.fromkeys(run.method for run in runs):
        by_rate: dict[float, list[Outcome]] = {}
        for run in runs:
            if run.method == method:
                by_rate.setdefault(run.rate, []).append(run.outcome)
        rate, held = max(by_rate.items(), key=lambda item: _validation(item[1]))
        tests = tuple(_or_zero(outcome.test) for outcome in held)
        share = statistics.mean(outcome.bytes_share for outcome in held)
        backward = statistics.median(outcome.backward_ms for outcome in held)
        found.append(Summary(method, rate, tests, share, backward))
    return found


def summary_table(rows: list[Summary]) -> str:
    """The summaries as text."""
    lines = [f"{'':<22}{'budget':>8}{'lr':>6}{'test, %':>16}{'bytes':>8}"]
    for row in rows:
        lines.append(
            f"{row.method.family:<22}{row.method.budget:>8.0%}{row.rate:>6g}"
            f"{row.mean:>9.2f} ± {row.deviation:.2f}{row.bytes_share:>8.1%}"
        )
    return "\n".join(lines)


def _validation(outcomes: list[Outcome]) -> float:
    return statistics.mean(_or_zero(outcome.validation) for outcome in outcomes)


def _or_zero(accuracy: float) -> float:
    """A run whose loss was not finite has learned nothing."""
    return 0.0 if math.isnan(accuracy) else accuracy
