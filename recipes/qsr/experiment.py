"""QSR compared with the synchronisation schedules of its paper, on small tasks.

    python -m recipes.qsr.experiment               # all comparisons, 12 seeds
    python -m recipes.qsr.experiment --quick
    python -m recipes.qsr.experiment --only lengths decays --resume

Every method is tuned on one half of the images. Its best point runs on the other half, with other
seeds. A seed draws training images, wrong labels and images to evaluate on. Every part has a file
in ``--out``, with one row per run and seed. All ranks of a run are in one process.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

from recipes.errors import exit_on_user_error
from recipes.experiments import ExperimentParser, Part, ResultTable, run_parts, tuning_seeds
from recipes.qsr.pictures import PICTURES
from recipes.qsr.settings import GRID, PARALLEL, PARTS, QUICK_GRID, Grid, Point, Run, Setting, Study
from recipes.qsr.tables import summary
from recipes.qsr.task import SAMPLES
from recipes.qsr.training import Outcome, train
from recipes.rows import Row, columns, typed, where

_QUICK_SHORTER = 20
_TASK = "schedules of averages; the columns have all settings"


@exit_on_user_error()
def main() -> None:
    """Run the comparisons, print and save their results; bad input ends in one line."""
    arguments = parse(sys.argv[1:])
    parts = {name: Part(partial(open_part, name)) for name in arguments.only}
    # The tables and pictures are of all files of the folder.
    last = arguments.only[-1]
    parts[last] = replace(parts[last], tables=[summary], pictures=PICTURES)
    run_parts(arguments, parts)


def parse(words: list[str]) -> argparse.Namespace:
    parser = ExperimentParser(__doc__, Path(__file__).resolve().parent, PARTS, seeds=range(12))
    parsed = parser.read(words)
    parsed.out = parser.output_folder(parsed)
    return parsed


def open_part(name: str, arguments: argparse.Namespace) -> Callable[[], None]:
    path, run = arguments.out / f"{name}.csv", columns(Run)
    table = ResultTable(path, run, columns(Outcome), _TASK, resume=arguments.resume)
    seeds, grid = arguments.seeds, QUICK_GRID if arguments.quick else GRID
    tuning = tuning_seeds(seeds, grid.seeds)

    def measure() -> None:
        for study in PARTS[name]:
            if arguments.quick:
                epochs = max(2, study.setting.epochs // _QUICK_SHORTER)
                study = replace(study, setting=replace(study.setting, epochs=epochs))
            print(study.setting, flush=True)
            run_study(study, table, grid, seeds, tuning)

    return measure


def run_study(
    study: Study, table: ResultTable, grid: Grid, seeds: Sequence[int], tuning: Sequence[int]
) -> None:
    """Tune every method and run its best point with all seeds.

    All methods use the peak learning rate that is best for parallel training, and each uses its own
    weight decay, as in the paper.
    """
    setting = study.setting

    def tuned(method: str, peak: float | None = None) -> Point:
        """Return the point of highest accuracy in tuning; among equals, that of least traffic."""

        def merit(point: Point) -> tuple[float, int]:
            found = measured(table, setting, point, tuning, "validation")
            # A run that diverged sent nothing. It is no better for that.
            return fmean(row["accuracy"] for row in found), -max(row["nbytes"] for row in found)

        return max(grid.points(method, setting, SAMPLES, peak), key=merit)

    best = tuned(PARALLEL)
    for method in study.methods:
        point = best if method == PARALLEL else tuned(method, best.lr)
        measured(table, setting, point, seeds, "test")


def measured(
    table: ResultTable, setting: Setting, point: Point, seeds: Sequence[int], part: str
) -> list[Row]:
    """Return the rows of a point; train the seeds that the table lacks, side by side."""
    runs = [Run(setting, point, seed, part) for seed in seeds]
    if missing := table.missing(runs):
        found = train(setting, point, [run.seed for run in missing], part)
        for run, outcome in zip(missing, found, strict=True):
            table.add(run, outcome)
    wanted = {**vars(setting), **vars(point), "part": part}
    rows = [row for row in where(typed(table.rows), **wanted) if row["seed"] in seeds]
    accuracy, syncs = fmean(row["accuracy"] for row in rows), max(row["syncs"] for row in rows)
    print(
        f"{part:<11}{point.schedule:<40}lr {point.lr:<6g} decay {point.weight_decay:<6g}"
        f"{accuracy:6.2f} %{syncs:8,} syncs",
        flush=True,
    )
    return rows


if __name__ == "__main__":
    main()
