"""One training run of many workers: its settings, and what is measured."""

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from recipes.bidirectional_topk.methods import METHODS
from recipes.bidirectional_topk.problems import Problem
from recipes.bidirectional_topk.serial import SerialWorkers
from recipes.bidirectional_topk.training import batches, evaluate

RATIO = 0.001
"""The thesis's K, as a share of d."""
WINDOW = 25
"""Number of steps over which the union is averaged."""


@dataclass(frozen=True, order=True)
class Run:
    """The settings of a run.

    Attributes:
        ratio: K = ``ratio`` times d.
        images: on which the accuracy is measured, "validation" or "test".
    """

    dataset: str
    model: str
    method: str
    workers: int
    lr: float
    steps: int
    seed: int
    ratio: float = RATIO
    images: str = "test"

    @classmethod
    def of(cls, row: dict[str, str]) -> "Run":
        """Read the settings from a row of a table."""
        types: dict[str, Any] = {field.name: field.type for field in fields(cls)}
        return cls(**{name: read(row[name]) for name, read in types.items()})


@dataclass(frozen=True)
class Outcome:
    """What is measured in a run.

    Attributes:
        d: number of parameters.
        k: number of entries of a message.
        touched: number of parameters that ever had a gradient other than 0.
        accuracy: in per cent; 0 if the run diverged.
        loss: mean loss on the same images.
        unions: number of entries that at least one worker sent, in units of K: the mean of each
            window of :data:`WINDOW` steps. 0 without compression on the uplink.
    """

    d: int
    k: int
    touched: int
    accuracy: float
    loss: float
    unions: tuple[float, ...]

    def cells(self) -> list[object]:
        """Return the columns of the table."""
        unions = " ".join(f"{union:.2f}" for union in self.unions)
        return [self.d, self.k, self.touched, f"{self.accuracy:.3f}", f"{self.loss:.4f}", unions]


COLUMNS = tuple(field.name for each in (Run, Outcome) for field in fields(each))


def cells(run: Run, outcome: Outcome) -> list[object]:
    """Return the row of a run."""
    return [*asdict(run).values(), *outcome.cells()]


def missing(wanted: Iterable[Run], rows: Sequence[dict[str, str]]) -> list[Run]:
    """Return the runs that a table lacks."""
    finished = {Run.of(row) for row in rows}
    return [run for run in wanted if run not in finished]


def train_serially(run: Run, problem: Problem) -> tuple[Outcome, SerialWorkers]:
    """Take all steps of a run. Return also the workers, as they are after the last step."""
    model = problem.build(run.seed)
    workers = SerialWorkers(model, METHODS[run.method], run.workers, run.ratio)
    start = workers.weights.clone()
    unions: list[float] = []
    for chosen in itertools.islice(batches(problem, run.workers, run.seed), run.steps):
        mine = problem.train.take(chosen)
        if not workers.step(mine.images, mine.labels, run.lr):
            break
        unions.append(workers.union / workers.k)
    diverged = len(unions) < run.steps
    tested = problem.test if run.images == "test" else problem.validation
    accuracy, loss = (0.0, float("inf")) if diverged else evaluate(model, tested)
    outcome = Outcome(
        d=start.numel(),
        k=workers.k,
        touched=_touched(workers, start),
        accuracy=accuracy,
        loss=loss,
        unions=tuple(
            statistics.fmean(unions[i : i + WINDOW]) for i in range(0, len(unions), WINDOW)
        ),
    )
    return outcome, workers


def _touched(workers: SerialWorkers, start: torch.Tensor) -> int:
    """Return the number of parameters that have changed or have a residual."""
    unsent = (workers.residuals != 0).any(0) | (workers.server_residual != 0)
    return int((unsent | (workers.weights != start)).sum())
