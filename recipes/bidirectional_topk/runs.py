"""The training runs of the parts: unions of supports, accuracies, and where the learning rate is.

In the thesis, the residual is in the unit of the update: a = eps + lr * g. What is sent late is
applied at the learning rate of the step that it comes from ("inside"; ``lr_inside`` in torchcomp).
By default, it is applied at that of the step that sends it ("outside").
"""

import argparse
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean

from recipes.bidirectional_topk.problems import Problem, batches, open_problem
from recipes.bidirectional_topk.workers import METHODS, SerialWorkers
from recipes.experiments import ResultTable, fill, tuning_seeds
from recipes.image_data.in_memory import evaluate
from recipes.rows import Row, best, columns, typed, where

RATIO = 0.001
"""The thesis's K, as a share of d."""
WINDOW = 25
"""Number of steps over which the union is averaged."""
LR, STEPS = 0.3, 1000
LRS = (0.1, 0.3, 1.0, 3.0)
ONE_WAY, BOTH_WAYS = "unidirectional", "bidirectional"

Measure = Callable[[], None]


@dataclass(frozen=True)
class Run:
    """The settings of a run, with K = ``ratio`` times d. ``images`` are those of the accuracy."""

    dataset: str
    model: str
    method: str
    workers: int
    lr: float
    steps: int
    seed: int
    ratio: float = RATIO
    images: str = "test"


@dataclass(frozen=True)
class Outcome:
    d: int
    k: int
    accuracy: str
    loss: str
    unions: str


def constant(done: float) -> float:
    return 1.0


def by_steps(done: float) -> float:
    """Return 1, then 0.1 after half of the run, then 0.01 after three quarters."""
    return 0.1 ** sum(done >= part for part in (0.5, 0.75))


def cosine(done: float) -> float:
    """Return half a cosine wave from 1 to 0."""
    return 0.5 * (1 + math.cos(math.pi * done))


SCHEDULES = {"by steps": by_steps, "cosine": cosine}
"""The learning rate as a share of its peak, from the share of the steps that are done."""


def train(
    run: Run,
    problem: Problem,
    schedule: Callable[[float], float] = constant,
    *,
    inside: bool = False,
) -> Outcome:
    model = problem.build(run.seed)
    workers = SerialWorkers(model, METHODS[run.method], run.workers, run.ratio)
    before = run.lr
    unions: list[float] = []
    chosen = itertools.islice(batches(problem, run.workers, run.seed), run.steps)
    for step, indices in enumerate(chosen):
        lr = run.lr * schedule(step / run.steps)
        if inside:
            # From the unit of the last update to that of the next.
            workers.residuals.mul_(before / lr)
            workers.server_residual.mul_(before / lr)
        mine = problem.train.take(indices)
        if not workers.step(mine.images, mine.labels, lr):
            break
        unions.append(workers.union / workers.k)
        before = lr
    diverged = len(unions) < run.steps
    tested = problem.test if run.images == "test" else problem.validation
    accuracy, loss = (0.0, math.inf) if diverged else evaluate(model, tested)
    windows = [fmean(unions[i : i + WINDOW]) for i in range(0, len(unions), WINDOW)]
    return Outcome(
        *(workers.weights.numel(), workers.k),
        *(f"{accuracy:.3f}", f"{loss:.4f}", " ".join(f"{union:.2f}" for union in windows)),
    )


# A process measures many runs of the same problem.
_problem = cache(open_problem)


# --- The union of the supports --------------------------------------------------------------------


def open_union(arguments: argparse.Namespace) -> Measure:
    quick, dataset = arguments.quick, arguments.dataset
    # A fifth of the steps is a whole number of windows.
    steps = 125 if quick else STEPS
    open_problem(dataset, "mlp", arguments.data)
    table = ResultTable(
        arguments.out / "union.csv",
        columns(Run),
        columns(Outcome),
        f"{dataset}, {steps} steps, unions over windows of {WINDOW} steps",
        resume=arguments.resume,
    )
    few, many = ((2, 4), (2, 4, 8)) if quick else ((5, 20, 100), (2, 5, 10, 20, 50, 100))
    usual = Run(dataset, "mlp", ONE_WAY, 20, LR, steps, seed=0)
    runs = [replace(usual, seed=s, workers=n) for s in arguments.seeds[:3] for n in many]
    for seed in arguments.seeds[:2]:
        same = replace(usual, seed=seed)
        runs += [replace(same, method=BOTH_WAYS, workers=n) for n in many]
        runs += [replace(same, model="cnn", workers=n) for n in few]
    measure = partial(measure_run, data=arguments.data)
    return lambda: fill(table, runs, measure, arguments.processes)


def measure_run(run: Run, data: Path | None) -> Outcome:
    return train(run, _problem(run.dataset, run.model, data))


# --- Accuracy, each method at its own learning rate -----------------------------------------------


def open_accuracy(arguments: argparse.Namespace) -> Measure:
    """Return what tunes the learning rate of each method, and measures its accuracy."""
    quick, dataset = arguments.quick, arguments.dataset
    cases = [("mlp", n) for n in ((4,) if quick else (20, 50, 100))]
    cases.append(("cnn", 4 if quick else 20))
    lrs, steps = (LRS[:2], 20) if quick else (LRS, 200)
    open_problem(dataset, "mlp", arguments.data)
    table = ResultTable(
        arguments.out / "accuracy.csv",
        *(columns(Run), columns(Outcome)),
        f"{dataset}, {steps} steps, learning rates {_listed(lrs)}",
        resume=arguments.resume,
    )
    # The longest first, so that no process is left alone with one at the end.
    usual = [
        Run(dataset, model, method, workers, lrs[0], steps, seed=0)
        for model, workers in cases
        for method in reversed(METHODS)
    ]
    (tuning,) = tuning_seeds(arguments.seeds, 1)
    tried = [replace(r, lr=lr, seed=tuning, images="validation") for r in usual for lr in lrs]

    def measure() -> None:
        train_one = partial(measure_run, data=arguments.data)
        fill(table, tried, train_one, arguments.processes)
        rows = typed(table.rows)
        reported = [
            replace(run, lr=best_lr(rows, _case(run)), seed=seed)
            for run in usual
            for seed in arguments.seeds[:5]
        ]
        fill(table, reported, train_one, arguments.processes)

    return measure


def _case(run: Run) -> dict[str, object]:
    return {"model": run.model, "workers": run.workers, "method": run.method}


def best_lr(rows: Sequence[Row], wanted: dict[str, object]) -> float:
    """Return the learning rate with the highest accuracy on the held-out images."""
    tried = where(rows, images="validation", **wanted)
    # Equal accuracies are common on few held-out images; the loss decides between them.
    return float(best(tried, "lr", "accuracy", lambda row: -row["loss"]))


def _listed(lrs: Sequence[float]) -> str:
    return " ".join(f"{lr:g}" for lr in lrs)


# --- The learning rate inside the residual and outside of it --------------------------------------

FORMS = ("outside", "inside")
LR_RUN = ("schedule", "method", "form", "images", "lr", "seed")


def open_lr_inside(arguments: argparse.Namespace) -> Measure:
    """Return what compares both places of the learning rate, one run after another."""
    dataset = arguments.dataset
    workers, steps, lrs, tuning = (4, 20, LRS[1:2], 1) if arguments.quick else (20, 300, LRS, 2)
    problem = open_problem(dataset, "mlp", arguments.data)
    table = ResultTable(
        arguments.out / "lr_inside.csv",
        *(LR_RUN, ("accuracy", "loss")),
        f"{dataset}, mlp, {workers} workers, {steps} steps, K = {RATIO:g} d, peak learning rates "
        f"{_listed(lrs)}",
        resume=arguments.resume,
    )

    def train_one(run: tuple[str, str, str, str, float, int]) -> tuple[str, str]:
        schedule, method, form, images, lr, seed = run
        settings = Run(dataset, "mlp", method, workers, lr, steps, seed, images=images)
        outcome = train(settings, problem, SCHEDULES[schedule], inside=form == "inside")
        return outcome.accuracy, outcome.loss

    def measure() -> None:
        for case in itertools.product(SCHEDULES, (ONE_WAY, BOTH_WAYS), FORMS):
            tried = itertools.product(lrs, tuning_seeds(arguments.seeds, tuning))
            fill(table, [(*case, "validation", *each) for each in tried], train_one)
            named = dict(zip(LR_RUN, case, strict=False))
            lr = best_lr(typed(table.rows), named)
            fill(table, [(*case, "test", lr, seed) for seed in arguments.seeds], train_one)

    return measure
