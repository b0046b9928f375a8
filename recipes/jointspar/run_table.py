"""Result files: one row a run, where they come from, and means over seeds."""

import csv
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from recipes.errors import RecipeError
from recipes.jointspar.layer_training import Method, Outcome
from recipes.result_files import read_csv, read_notes, write_csv

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


def start_csv(path: Path, task: str) -> None:
    """Begin the table of a task; what trains on what is among the comments above it."""
    write_csv(path, _HEADER, [], task=task)


def append_csv(path: Path, run: Run) -> None:
    """Add a run, at once on disk."""
    method, outcome = run.method, run.outcome
    row = [method.kind, method.budget, method.norm, run.rate, run.seed]
    row += [f"{outcome.validation:.3f}", f"{outcome.test:.3f}", f"{outcome.bytes_share:.4f}"]
    row += [f"{outcome.step_ms:.3f}", f"{outcome.backward_ms:.3f}", f"{outcome.seconds:.2f}"]
    with path.open("a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerow(row)


def read_runs(path: Path, task: str) -> list[Run]:
    """Return the runs of a task's table.

    Raises:
        RecipeError: if there is no table, or it is of another task.
    """
    if not path.is_file():
        raise RecipeError(
            f"there is no {path}: python -m recipes.jointspar.large_batch writes it first"
        )
    found = read_notes(path).get("task", "a task that it does not name")
    if found != task:
        raise RecipeError(
            f"{path} holds runs of {found}, which say nothing of {task}: name another folder by "
            "--out"
        )
    return [_run(row) for row in read_csv(path)]


def _run(row: dict[str, str]) -> Run:
    return Run(
        Method(row["kind"], float(row["budget"]), row["norm"]),
        float(row["rate"]),
        int(row["seed"]),
        Outcome(*(float(row[name]) for name in _OUTCOME)),
    )


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
