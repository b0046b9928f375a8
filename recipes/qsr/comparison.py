"""Tune each method on a grid, then measure the best point of each."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from recipes.qsr.ledger import Ledger, TrainingRun
from recipes.qsr.local_training import PARALLEL, Length, Outcome, train
from recipes.qsr.task import Task

METHODS = ("parallel", "constant H", "linear", "QSR", "cubic", "post-local", "SWAP")
EXPONENTS = {"linear": 1, "QSR": 2, "cubic": 3}


@dataclass(frozen=True)
class Grid:
    """The points to try.

    Attributes:
        lrs: peak learning rates of parallel training. The other methods use the best of them.
        periods: H of constant H.
        bases: H_base of the three rules.
        starts: the H that a rule gives at the peak learning rate, which sets its coefficient.
        switches: when post-local SGD and SWAP stop averaging every step, as a fraction of the steps
            after warm-up.
        post_local_periods: H of post-local SGD after the switch.
        seeds: every point runs with these and is evaluated on the validation part. The reported
            seeds are others, so that they choose nothing.
    """

    lrs: tuple[float, ...] = (0.1, 0.2, 0.4)
    periods: tuple[int, ...] = (2, 4, 8, 16)
    bases: tuple[int, ...] = (2, 4)
    starts: tuple[int, ...] = (1, 4, 16)
    switches: tuple[float, ...] = (0.25, 0.5, 0.75)
    post_local_periods: tuple[int, ...] = (4, 16)
    seeds: tuple[int, ...] = (1000, 1001)

    def schedules(self, method: str, *, peak: float, total: int, warmup: int) -> list[str]:
        """Return the points of a method, for T = ``total`` and W = ``warmup`` steps."""
        if method in EXPONENTS:
            exponent = EXPONENTS[method]
            # H = (coefficient / lr)^exponent equals `start` at the peak learning rate.
            return [
                _rule(exponent, peak * start ** (1 / exponent), h_base)
                for h_base in self.bases
                for start in self.starts
            ]
        switches = [warmup + round(share * (total - warmup)) for share in self.switches]
        points = {
            "parallel": [PARALLEL],
            "constant H": [f"every({h})" for h in self.periods],
            "post-local": [
                f"post_local(switch={s}, h={h})" for s in switches for h in self.post_local_periods
            ],
            "SWAP": [f"swap(switch={s})" for s in switches],
        }
        return points[method]


def _rule(exponent: int, coefficient: float, h_base: int) -> str:
    if exponent == 2:
        return f"qsr(alpha={coefficient:g}, h_base={h_base})"
    return f"power(coef={coefficient:g}, exponent={exponent}, h_base={h_base})"


@dataclass(frozen=True)
class Entry:
    """A schedule of a method, with one outcome per seed."""

    method: str
    schedule: str
    lr: float
    outcomes: tuple[Outcome, ...]

    @property
    def accuracy(self) -> float:
        """Mean accuracy over the seeds, in per cent."""
        return statistics.fmean(outcome.accuracy for outcome in self.outcomes)

    @property
    def deviation(self) -> float:
        """Sample standard deviation of the accuracy over the seeds; NaN for a single seed."""
        return _deviation([outcome.accuracy for outcome in self.outcomes])

    @property
    def loss(self) -> float:
        """Mean loss over the seeds."""
        return statistics.fmean(outcome.loss for outcome in self.outcomes)

    @property
    def syncs(self) -> int:
        """Number of synchronisations, which does not depend on the seed."""
        return self.outcomes[0].syncs

    @property
    def nbytes(self) -> int:
        """Bytes that one rank sent in a run."""
        return self.outcomes[0].nbytes

    def ahead_of(self, other: "Entry") -> tuple[float, float]:
        """Return mean and standard error of the difference in accuracy, paired by seed."""
        pairs = zip(self.outcomes, other.outcomes, strict=True)
        differences = [mine.accuracy - theirs.accuracy for mine, theirs in pairs]
        error = _deviation(differences) / math.sqrt(len(differences))
        return statistics.fmean(differences), error


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else math.nan


@dataclass(frozen=True)
class Comparison:
    """The results of all methods.

    Attributes:
        dataset: name.
        label_noise: fraction of the training labels that were replaced by random ones.
        total_steps: T.
        warmup_steps: W.
        peak: peak learning rate of every method.
        trials: every point of the grid, on the validation part.
        entries: each method's best point, on the test part.
    """

    dataset: str
    label_noise: float
    total_steps: int
    warmup_steps: int
    peak: float
    trials: list[Entry]
    entries: list[Entry]

    def entry(self, method: str) -> Entry | None:
        """Return the method's best point, or None if the method was not run."""
        return next((entry for entry in self.entries if entry.method == method), None)


def best(trials: list[Entry]) -> Entry:
    """Return the trial of highest validation accuracy; among equals, the one with least traffic."""
    return max(trials, key=lambda trial: (trial.accuracy, -trial.nbytes))


@dataclass(frozen=True)
class Laboratory:
    """Trains schedules on all ranks, unless the ledger has their outcome.

    Attributes:
        task: data and model.
        length: of every run.
        ledger: stores the outcomes.
        report: called with a line of text per measured schedule.
    """

    task: Task
    length: Length
    ledger: Ledger
    report: Callable[[str], None]

    def measure(
        self, method: str, schedule: str, lr: float, seeds: Sequence[int], part: str
    ) -> Entry:
        """Train a schedule with every seed and evaluate it on a part; all ranks call this."""
        outcomes = tuple(self._outcome(schedule, lr, seed, part) for seed in seeds)
        entry = Entry(method, schedule, lr, outcomes)
        self.report(
            f"{part:<11}{schedule:<40}lr {lr:<6g}{entry.accuracy:6.2f} %{entry.syncs:8,} syncs"
        )
        return entry

    def _outcome(self, schedule: str, lr: float, seed: int, part: str) -> Outcome:
        length, evaluated = self.length, self.task.part(part)
        size = (dist.get_world_size(), length.batch, length.epochs, length.warmup_epochs)
        run = TrainingRun(self.task.dataset, self.task.label_noise, *size, schedule, lr, seed, part)
        return self.ledger.outcome(
            run,
            lambda: _from_rank_0(
                train(self.task, schedule, lr=lr, seed=seed, length=length, evaluated=evaluated)
            ),
        )


def _from_rank_0(outcome: Outcome) -> Outcome:
    """Return rank 0's outcome on all ranks."""
    # Rounding can differ between ranks. Without this, two ranks could choose different points of
    # the grid, and their next collectives would not match.
    box = [outcome]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def compare(laboratory: Laboratory, methods: Sequence[str], grid: Grid, seeds: int) -> Comparison:
    """Tune every method on the validation part and run it with all seeds; all ranks call this.

    The peak learning rate is that of parallel training. All methods use it, as in the paper.
    """
    task = laboratory.task
    samples = len(task.train.labels)
    total, warmup = laboratory.length.steps(samples), laboratory.length.warmup_steps(samples)

    def trial(method: str, schedule: str, lr: float) -> Entry:
        return laboratory.measure(method, schedule, lr, grid.seeds, "validation")

    trials = [trial("parallel", PARALLEL, lr) for lr in grid.lrs]
    peak = best(trials).lr
    entries = []
    for method in methods:
        # Parallel training has a single schedule, which was tried above.
        if method != "parallel":
            points = grid.schedules(method, peak=peak, total=total, warmup=warmup)
            trials += [trial(method, schedule, peak) for schedule in points]
        chosen = best([trial for trial in trials if trial.method == method]).schedule
        entries.append(laboratory.measure(method, chosen, peak, range(seeds), "test"))
    return Comparison(task.dataset, task.label_noise, total, warmup, peak, trials, entries)
