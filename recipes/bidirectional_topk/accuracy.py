"""Final test accuracy of the four methods, each at its own learning rate."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from recipes.bidirectional_topk import runs
from recipes.bidirectional_topk.methods import METHODS
from recipes.bidirectional_topk.problems import Problem
from recipes.bidirectional_topk.runs import Run

COLUMNS = runs.COLUMNS
Row = dict[str, str]
"""A row of the table, as texts by column."""
Case = tuple[str, int]
"""A model and a number of workers."""


@dataclass(frozen=True)
class AccuracySize:
    """The grid of the measurement.

    Attributes:
        cases: models, each with a number of workers. They are measured one after another.
        lrs: the learning rates that are tried with every method.
        tuning_seeds: how many seeds each is tried with.
        seeds: how many of the reported seeds are used.
    """

    cases: tuple[Case, ...] = (("mlp", 20), ("mlp", 50), ("mlp", 100), ("cnn", 20))
    lrs: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)
    steps: int = 200
    tuning_seeds: int = 1
    seeds: int = 5

    def task(self, dataset: str) -> str:
        """Return the settings that all rows share."""
        lrs = " ".join(f"{lr:g}" for lr in self.lrs)
        return f"{dataset}, {self.steps} steps, learning rates {lrs}"

    def tuning_runs(self, dataset: str, case: Case, seeds: Sequence[int]) -> list[Run]:
        """Return the runs that choose the learning rates of one case."""
        return [
            replace(usual, lr=lr, seed=seed, images="validation")
            for usual in self._usual(dataset, case)
            for lr in self.lrs
            for seed in seeds
        ]

    def test_runs(
        self, dataset: str, case: Case, seeds: Sequence[int], rows: Sequence[Row]
    ) -> list[Run]:
        """Return the reported runs of one case, each at the learning rate that was chosen."""
        return [
            replace(usual, lr=best_lr(usual, rows), seed=seed)
            for usual in self._usual(dataset, case)
            for seed in seeds[: self.seeds]
        ]

    def _usual(self, dataset: str, case: Case) -> list[Run]:
        model, workers = case
        # The longest first, so that no process is left alone with one at the end.
        return [
            Run(dataset, model, method, workers, self.lrs[0], self.steps, seed=0)
            for method in reversed(METHODS)
        ]


def measure(run: Run, problem: Problem) -> list[object]:
    """Return the row of a run."""
    outcome, _ = runs.train_serially(run, problem)
    return runs.cells(run, outcome)


def best_lr(like: Any, rows: Sequence[Row]) -> float:
    """Return the learning rate with the highest accuracy on the held-out images.

    Args:
        like: a run of the method, of any class with rows, with any learning rate and seed.
        rows: the table.
    """
    tried: dict[float, list[tuple[float, float]]] = {}
    for row in rows:
        run = type(like).of(row)
        if run == replace(like, lr=run.lr, seed=run.seed, images="validation"):
            # Equal accuracies are common on few held-out images; the loss decides between them.
            tried.setdefault(run.lr, []).append((float(row["accuracy"]), -float(row["loss"])))
    means = {lr: [*map(statistics.fmean, zip(*found, strict=True))] for lr, found in tried.items()}
    return max(means, key=means.__getitem__)
