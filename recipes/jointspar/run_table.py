"""The table of training runs, and its summary over the seeds."""

import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from recipes.errors import RecipeError
from recipes.experiments import ResultTable
from recipes.jointspar.layer_training import Outcome
from recipes.jointspar.methods import Dense, LayerSampling, Method, parse_method
from recipes.spread import Spread, paired, spread

TABLE = "large_batch.csv"
FAILED = 10.0
"""A run fails if it diverges, or ends this many points below the mean of dense training."""
_OUTCOME = ("validation", "test", "bytes_share", "step_ms", "backward_ms", "seconds")
COLUMNS = ("method", "optimizer", "lr", "seed", *_OUTCOME)


@dataclass(frozen=True)
class Contender:
    """A method and an optimizer."""

    method: Method
    optimizer: str = "lars"

    @property
    def label(self) -> str:
        """A name for pictures and tables, without the budget."""
        method = self.method
        named = _NAMES.get(method.name, "")
        if isinstance(method, LayerSampling):
            named = "uniform dropping" if method.rule is None else "JointSpar-LARS"
            named += "" if method.topk is None else " + ef(topk)"
        return f"{named}, own norm" if self.optimizer == "lars-own" else named


_NAMES = {"dense": "dense LARS", "topk": "ef(topk)"}


@dataclass(frozen=True)
class PlannedRun:
    """A contender, a learning rate and a seed to train with."""

    contender: Contender
    lr: float
    seed: int


@dataclass(frozen=True)
class TrainingRun:
    """A planned run, and its measurements."""

    planned: PlannedRun
    outcome: Outcome

    def cells(self) -> list[object]:
        """Return the row of the CSV."""
        planned, outcome = self.planned, self.outcome
        return [
            *(planned.contender.method, planned.contender.optimizer, planned.lr, planned.seed),
            *(f"{outcome.validation:.3f}", f"{outcome.test:.3f}", f"{outcome.bytes_share:.4f}"),
            *(f"{outcome.step_ms:.3f}", f"{outcome.backward_ms:.3f}", f"{outcome.seconds:.2f}"),
        ]

    @classmethod
    def of(cls, row: dict[str, str]) -> "TrainingRun":
        """Read a row of the CSV."""
        contender = contender_of(row)
        planned = PlannedRun(contender, float(row["lr"]), int(row["seed"]))
        return cls(planned, Outcome(*(float(row[name]) for name in _OUTCOME)))


def contender_of(row: dict[str, str]) -> Contender:
    """Read the first cells of a row."""
    return Contender(parse_method(row["method"]), row["optimizer"])


@dataclass(frozen=True)
class Summary:
    """A contender at its best learning rate.

    Attributes:
        tests: test accuracy in per cent by seed; NaN if training diverged.
        bytes_share: mean share of dense DDP's bytes.
        least: the lowest test accuracy of a run that has not failed.
    """

    contender: Contender
    lr: float
    tests: dict[int, float]
    bytes_share: float
    least: float = 0.0

    @property
    def finished(self) -> dict[int, float]:
        """The test accuracies of the runs that did not fail, by seed."""
        return {seed: test for seed, test in self.tests.items() if test >= self.least}

    @property
    def failed(self) -> int:
        """The number of failed runs."""
        return len(self.tests) - len(self.finished)

    @property
    def accuracy(self) -> Spread:
        """The test accuracy of the runs that did not fail; NaN if all did."""
        return spread(self.finished.values() or [math.nan])

    def against(self, other: "Summary") -> Spread | None:
        """Return the difference to another contender, over the seeds of which neither failed."""
        both = self.finished.keys() & other.finished.keys()
        return paired(self.finished, other.finished) if both else None


def read_runs(folder: Path, task: str) -> list[TrainingRun]:
    """Return the runs in a folder's table.

    Raises:
        RecipeError: if there is no table, or if it has the runs of another task.
    """
    path = folder / TABLE
    if not path.is_file():
        raise RecipeError(
            f"{path} does not exist: run recipes.jointspar.large_batch with this --out first"
        )
    return [TrainingRun.of(row) for row in ResultTable(path, COLUMNS, task, resume=True).rows]


def summaries(runs: list[TrainingRun]) -> list[Summary]:
    """Return each contender at the learning rate with the best mean accuracy on held-out images."""
    found: list[Summary] = []
    for contender in dict.fromkeys(run.planned.contender for run in runs):
        by_lr: dict[float, dict[int, Outcome]] = {}
        for run in runs:
            if run.planned.contender == contender:
                by_lr.setdefault(run.planned.lr, {})[run.planned.seed] = run.outcome
        lr, outcomes = max(by_lr.items(), key=lambda item: _validation(item[1]))
        tests = {seed: outcome.test for seed, outcome in outcomes.items()}
        share = statistics.mean(outcome.bytes_share for outcome in outcomes.values())
        found.append(Summary(contender, lr, tests, share))
    dense = [each.accuracy.mean for each in found if each.contender.method == Dense()]
    return [replace(each, least=dense[0] - FAILED) for each in found] if dense else found


def summary_table(rows: list[Summary]) -> str:
    """Return the summaries as text."""
    lines = [f"{'':<34}{'budget':>8}{'lr':>6}{'test, %':>16}{'failed':>8}{'bytes':>8}"]
    for row in rows:
        lines.append(
            f"{row.contender.label:<34}{row.contender.method.budget:>8.0%}{row.lr:>6g}"
            f"{row.accuracy.with_deviation():>16}{row.failed:>8}{row.bytes_share:>8.1%}"
        )
    return "\n".join(lines)


def _validation(outcomes: dict[int, Outcome]) -> float:
    found = [outcome.validation for outcome in outcomes.values()]
    # A run that diverged counts as 0 %. Leaving it out would favour unstable methods.
    return statistics.mean(0.0 if math.isnan(each) else each for each in found)
