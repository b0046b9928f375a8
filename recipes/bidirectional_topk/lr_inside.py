"""The learning rate inside the residual and outside of it, with a learning rate that falls.

In the thesis, the residual is in the unit of the update: a = eps + lr * g. What is sent late is
then applied at the learning rate of the step that it comes from ("inside"; ``lr_inside`` in
torchcomp). By default, torchcomp's residual is in the unit of the gradients, so it is applied at
the learning rate of the step that sends it ("outside"). With a constant learning rate both are the
same.

    python -m recipes.bidirectional_topk.lr_inside --resume
"""

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from recipes.bidirectional_topk.accuracy import best_lr
from recipes.bidirectional_topk.methods import METHODS
from recipes.bidirectional_topk.problems import Problem, open_problem
from recipes.bidirectional_topk.runs import RATIO
from recipes.bidirectional_topk.serial import SerialWorkers
from recipes.bidirectional_topk.training import batches, evaluate
from recipes.errors import exit_on_user_error
from recipes.experiments import ExperimentParser, ResultTable, tuning_seeds
from recipes.result_files import make_folder
from recipes.spread import Spread, paired, spread

TABLE = "lr_inside.csv"
MODEL = "mlp"
FORMS = ("outside", "inside")
COMPARED = ("unidirectional", "bidirectional")
SEEDS = range(10)


def by_steps(done: float) -> float:
    """Return 1, then 0.1 after half of the run, then 0.01 after three quarters."""
    return 0.1 ** sum(done >= part for part in (0.5, 0.75))


def cosine(done: float) -> float:
    """Return half a cosine wave from 1 to 0."""
    return 0.5 * (1 + math.cos(math.pi * done))


SCHEDULES: dict[str, Callable[[float], float]] = {"by steps": by_steps, "cosine": cosine}
"""The learning rate as a share of its peak, from the share of the steps that are done."""


@dataclass(frozen=True)
class LrInsideSize:
    """The grid of the measurement."""

    workers: int = 20
    steps: int = 300
    lrs: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)
    tuning_seeds: int = 2

    def task(self, dataset: str) -> str:
        """Return the settings that all rows share."""
        lrs = " ".join(f"{lr:g}" for lr in self.lrs)
        return (
            f"{dataset}, {MODEL}, {self.workers} workers, {self.steps} steps, "
            f"K = {RATIO:g} d, peak learning rates {lrs}"
        )


@dataclass(frozen=True)
class LrRun:
    """The settings of a run. ``images`` are those of the accuracy, "validation" or "test"."""

    schedule: str
    method: str
    form: str
    images: str
    lr: float
    seed: int

    @classmethod
    def of(cls, row: dict[str, str]) -> "LrRun":
        """Read the settings from a row of the table."""
        types: dict[str, Any] = {field.name: field.type for field in fields(cls)}
        return cls(**{name: read(row[name]) for name, read in types.items()})


COLUMNS = (*(field.name for field in fields(LrRun)), "accuracy", "loss")


@exit_on_user_error()
def main() -> None:
    """Measure the digits, and print the comparison."""
    arguments = parse(sys.argv[1:])
    size = LrInsideSize(workers=4, steps=20, lrs=(0.3,)) if arguments.quick else LrInsideSize()
    problem = open_problem("digits", MODEL, None)
    make_folder(arguments.out)
    torch.set_num_threads(1)  # tensors are small: more threads would only wait for each other
    task = size.task(problem.dataset)
    table = ResultTable(arguments.out / TABLE, COLUMNS, task, resume=arguments.resume)
    tuning = tuning_seeds(arguments.seeds, size.tuning_seeds)
    measure(problem, size, table, arguments.seeds, tuning)
    print(text_of(table.rows))


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = ExperimentParser(__doc__.splitlines()[0], Path(__file__).parent, seeds=SEEDS)
    parsed = parser.read(words)
    parsed.out = parser.output_folder(parsed)
    return parsed


def measure(
    problem: Problem,
    size: LrInsideSize,
    table: ResultTable,
    seeds: Sequence[int],
    tuning: Sequence[int],
) -> None:
    """Train what the table lacks, and save each run as it ends.

    Args:
        problem: the data set and the model.
        size: the grid.
        table: a table with :data:`COLUMNS`.
        seeds: of the reported runs, on the test images.
        tuning: seeds of the runs that choose the peak learning rate, on held-out images.
    """
    for schedule, method, form in itertools.product(SCHEDULES, COMPARED, FORMS):
        tried = LrRun(schedule, method, form, "validation", 0.0, 0)
        for lr, seed in itertools.product(size.lrs, tuning):
            _add(problem, size, table, replace(tried, lr=lr, seed=seed))
        reported = replace(tried, images="test", lr=best_lr(tried, table.rows))
        for seed in seeds:
            _add(problem, size, table, replace(reported, seed=seed))


def _add(problem: Problem, size: LrInsideSize, table: ResultTable, run: LrRun) -> None:
    if run not in {LrRun.of(row) for row in table.rows}:
        accuracy, loss = train(problem, size, run)
        table.add([*asdict(run).values(), f"{accuracy:.3f}", f"{loss:.4f}"])


def train(problem: Problem, size: LrInsideSize, run: LrRun) -> tuple[float, float]:
    """Return the accuracy, in per cent, and the loss after all steps; 0 and inf if it diverges."""
    model = problem.build(run.seed)
    workers = SerialWorkers(model, METHODS[run.method], size.workers, RATIO)
    before = run.lr
    chosen = itertools.islice(batches(problem, size.workers, run.seed), size.steps)
    for step, indices in enumerate(chosen):
        lr = run.lr * SCHEDULES[run.schedule](step / size.steps)
        if run.form == "inside":
            convert_residuals(workers, before / lr)
        mine = problem.train.take(indices)
        if not workers.step(mine.images, mine.labels, lr):
            return 0.0, math.inf
        before = lr
    tested = problem.test if run.images == "test" else problem.validation
    return evaluate(model, tested)


def convert_residuals(workers: SerialWorkers, ratio: float) -> None:
    """Convert residuals in the unit of the last update to that of the next.

    Args:
        workers: their residuals are in the unit of the gradients.
        ratio: the learning rate of the last step, over that of the next.
    """
    workers.residuals.mul_(ratio)
    workers.server_residual.mul_(ratio)


@dataclass(frozen=True)
class Comparison:
    """Both forms of one method with one schedule: test accuracies, in per cent.

    Attributes:
        lrs: the chosen peak learning rate of each form.
        accuracy: mean and deviation over the seeds, of each form.
        gain: inside minus outside, paired by seed.
    """

    schedule: str
    method: str
    lrs: dict[str, float]
    accuracy: dict[str, Spread]
    gain: Spread


def compare(rows: Sequence[dict[str, str]]) -> list[Comparison]:
    """Return the comparisons of a complete table."""
    found = []
    for schedule, method in itertools.product(SCHEDULES, COMPARED):
        lrs: dict[str, float] = {}
        by_seed: dict[str, dict[int, float]] = {form: {} for form in FORMS}
        for form in FORMS:
            reported = LrRun(schedule, method, form, "test", 0.0, 0)
            lrs[form] = best_lr(reported, rows)
            for row in rows:
                run = LrRun.of(row)
                # Other tuning seeds can have chosen another learning rate in an earlier session.
                if run == replace(reported, lr=lrs[form], seed=run.seed):
                    by_seed[form][run.seed] = float(row["accuracy"])
        accuracy = {form: spread(values.values()) for form, values in by_seed.items()}
        gain = paired(by_seed["inside"], by_seed["outside"])
        found.append(Comparison(schedule, method, lrs, accuracy, gain))
    return found


def text_of(rows: Sequence[dict[str, str]]) -> str:
    """Return the comparisons as a Markdown table."""
    lines = [
        "| learning rate | method | outside, % | inside, % | inside - outside | peak lr |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for each in compare(rows):
        cells = [each.schedule, each.method]
        cells += [each.accuracy[form].with_deviation() for form in FORMS]
        cells += [each.gain.with_error(), " / ".join(f"{each.lrs[form]:g}" for form in FORMS)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
