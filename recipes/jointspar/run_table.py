"""The table of training runs, and its summary over the seeds."""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from recipes.errors import RecipeError
from recipes.experiments import ResultTable
from recipes.jointspar.layer_training import Method, Outcome

TABLE = "large_batch.csv"
_OUTCOME = ("validation", "test", "bytes_share", "step_ms", "backward_ms", "seconds")
COLUMNS = ("kind", "budget", "norm", "lr", "seed", *_OUTCOME)


@dataclass(frozen=True)
class PlannedRun:
    """A method, a learning rate and a seed to train with."""

    method: Method
    lr: float
    seed: int


@dataclass(frozen=True)
class TrainingRun:
    """A planned run, and its measurements."""

    planned: PlannedRun
    outcome: Outcome

    def cells(self) -> list[object]:
        """Return the row of the CSV."""
        method, outcome = self.planned.method, self.outcome
        return [
            *(method.kind, method.budget, method.norm, self.planned.lr, self.planned.seed),
            *(f"{outcome.validation:.3f}", f"{outcome.test:.3f}", f"{outcome.bytes_share:.4f}"),
            *(f"{outcome.step_ms:.3f}", f"{outcome.backward_ms:.3f}", f"{outcome.seconds:.2f}"),
        ]

    @classmethod
    def of(cls, row: dict[str, str]) -> "TrainingRun":
        """Read a row of the CSV."""
        method = Method(row["kind"], float(row["budget"]), row["norm"])
        planned = PlannedRun(method, float(row["lr"]), int(row["seed"]))
        return cls(planned, Outcome(*(float(row[name]) for name in _OUTCOME)))


@dataclass(frozen=True)
class Summary:
    """A method at its best learning rate, over the seeds."""

    method: Method
    lr: float
    tests: tuple[float, ...]
    bytes_share: float
    backward_ms: float

    @property
    def mean(self) -> float:
        """Mean test accuracy in per cent."""
        return statistics.mean(self.tests)

    @property
    def deviation(self) -> float:
        """Sample standard deviation of the test accuracy."""
        return statistics.stdev(self.tests) if len(self.tests) > 1 else 0.0


def read_runs(folder: Path, task: str) -> list[TrainingRun]:
    """Return the runs in a folder's table.

    Raises:
        RecipeError: If there is no table, or if it has the runs of another task.
    """
    path = folder / TABLE
    if not path.is_file():
        raise RecipeError(f"{path} does not exist: run recipes.jointspar.large_batch first")
    table = ResultTable(path, COLUMNS, task, resume=True)
    return [TrainingRun.of(row) for row in table.rows]


def summaries(runs: list[TrainingRun]) -> list[Summary]:
    """Return each method at the learning rate with the best mean accuracy on held-out images."""
    found = []
    for method in dict.fromkeys(run.planned.method for run in runs):
        by_lr: dict[float, list[Outcome]] = {}
        for run in runs:
            if run.planned.method == method:
                by_lr.setdefault(run.planned.lr, []).append(run.outcome)
        lr, outcomes = max(by_lr.items(), key=lambda item: _validation(item[1]))
        tests = tuple(_or_zero(outcome.test) for outcome in outcomes)
        share = statistics.mean(outcome.bytes_share for outcome in outcomes)
        backward = statistics.median(outcome.backward_ms for outcome in outcomes)
        found.append(Summary(method, lr, tests, share, backward))
    return found


def summary_table(rows: list[Summary]) -> str:
    """Return the summaries as text."""
    lines = [f"{'':<22}{'budget':>8}{'lr':>6}{'test, %':>16}{'bytes':>8}"]
    for row in rows:
        lines.append(
            f"{row.method.family:<22}{row.method.budget:>8.0%}{row.lr:>6g}"
            f"{row.mean:>9.2f} ± {row.deviation:.2f}{row.bytes_share:>8.1%}"
        )
    return "\n".join(lines)


def _validation(outcomes: list[Outcome]) -> float:
    return statistics.mean(_or_zero(outcome.validation) for outcome in outcomes)


def _or_zero(accuracy: float) -> float:
    # A run that diverged counts as 0 %. Leaving it out would favour unstable methods.
    return 0.0 if math.isnan(accuracy) else accuracy
