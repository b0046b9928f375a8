"""Final test accuracy of dense, uni- and bidirectional training, each at its own learning rate."""

import statistics
from dataclasses import dataclass

from recipes.bidirectional_topk.downlink import BOTH_WAYS, DENSE, ONE_WAY, UnionLog
from recipes.bidirectional_topk.problems import Problem
from recipes.bidirectional_topk.simulation import Workers
from recipes.bidirectional_topk.training import evaluate, train
from recipes.image_data.in_memory import Split

METHODS = {"dense": DENSE, "unidirectional": ONE_WAY, "bidirectional": BOTH_WAYS}
COLUMNS = (
    *("dataset", "model", "method", "workers", "steps", "lr", "mean", "deviation"),
    *("late_union", "by_seed", "validation_by_lr"),
)
# Reported runs have seeds from 0. Tuning uses another seed, so that no reported run chooses the lr.
_TUNING_SEED = 1000


@dataclass(frozen=True)
class AccuracySize:
    """The size of the accuracy measurement."""

    workers: int
    steps: int
    lrs: tuple[float, ...]
    seeds: int

    def task(self, dataset: str) -> str:
        """Return the settings that all rows share."""
        lrs = " ".join(f"{lr:g}" for lr in self.lrs)
        return (
            f"{dataset}, {self.workers} workers, {self.steps} steps, learning rates {lrs}, "
            f"{self.seeds} seeds"
        )


@dataclass(frozen=True)
class Score:
    """One method on one problem, after tuning.

    Attributes:
        lr: the best of the grid, by accuracy on the held-out training images, then by loss.
        accuracies: on the test images, in per cent, one for each seed.
        union: size of the union of the supports, in units of K, over the second half of the runs.
            It is 0 for dense.
        tuning: accuracy on the held-out images, by learning rate.
    """

    dataset: str
    model: str
    method: str
    workers: int
    steps: int
    lr: float
    accuracies: tuple[float, ...]
    union: float
    tuning: dict[float, float]

    @property
    def mean(self) -> float:
        """Mean accuracy."""
        return statistics.fmean(self.accuracies)

    @property
    def deviation(self) -> float:
        """Sample standard deviation of the accuracy."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else 0.0

    def cells(self) -> list[object]:
        """Return the row of the CSV."""
        return [
            *(self.dataset, self.model, self.method, self.workers, self.steps, self.lr),
            *(f"{self.mean:.3f}", f"{self.deviation:.3f}", f"{self.union:.3f}"),
            " ".join(f"{accuracy:.2f}" for accuracy in self.accuracies),
            " ".join(f"{lr:g}:{accuracy:.2f}" for lr, accuracy in self.tuning.items()),
        ]


def compare(problem: Problem, method: str, size: AccuracySize) -> Score:
    """Tune one method's learning rate, then train with every seed."""
    tried = {
        lr: _run(problem, problem.validation, method, size, lr, _TUNING_SEED) for lr in size.lrs
    }
    # Equal accuracies are common on few held-out images; the loss decides between them.
    lr = max(tried, key=lambda lr: (tried[lr][0], -tried[lr][1]))
    runs = [_run(problem, problem.test, method, size, lr, seed) for seed in range(size.seeds)]
    return Score(
        dataset=problem.dataset,
        model=problem.model,
        method=method,
        workers=size.workers,
        steps=size.steps,
        lr=lr,
        accuracies=tuple(accuracy for accuracy, _, _ in runs),
        union=statistics.fmean(union for _, _, union in runs),
        tuning={lr: accuracy for lr, (accuracy, _, _) in tried.items()},
    )


def _run(
    problem: Problem, tested: Split, method: str, size: AccuracySize, lr: float, seed: int
) -> tuple[float, float, float]:
    """Return accuracy, loss and late union of one run; the accuracy is 0 if the run diverges."""
    model = problem.build(seed)
    compressed = method != "dense"
    workers = Workers(model, METHODS[method], size.workers, watch=compressed)
    log = UnionLog(workers)
    after = log if compressed else None
    if not train(problem, workers, model, lr=lr, steps=size.steps, seed=seed, after_step=after):
        return 0.0, float("inf"), 0.0
    return *evaluate(model, tested), log.late if compressed else 0.0


def order_of(row: dict[str, str]) -> tuple[str, int]:
    """Return the key by which rows of the CSV are sorted."""
    return row["model"], list(METHODS).index(row["method"])


def accuracy_table(rows: list[dict[str, str]]) -> str:
    """Return the rows of the CSV as text."""
    lines = [f"{'':<21}{'lr':>6}{'accuracy, %':>16}   late union/K"]
    for row in rows:
        lr, union = float(row["lr"]), float(row["late_union"])
        tried = [float(text.partition(":")[0]) for text in row["validation_by_lr"].split()]
        # A better learning rate may lie outside the grid.
        edge = "  (lr at the edge of the grid)" if lr in (tried[0], tried[-1]) else ""
        lines.append(
            f"{row['model'] + ', ' + row['method']:<21}{lr:>6g}"
            f"{float(row['mean']):>9.2f} ± {float(row['deviation']):.2f}   "
            f"{f'{union:.2f}' if union else '-':>6}{edge}"
        )
    return "\n".join(lines)
