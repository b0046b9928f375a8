"""QSR compared with the synchronisation schedules of its paper, on small tasks.

    python -m recipes.qsr.experiment               # all published comparisons, 12 seeds
    python -m recipes.qsr.experiment --quick
    python -m recipes.qsr.experiment --only lengths decays --resume
    python -m recipes.qsr.experiment --optimizer adamw --decay linear --ranks 2 --epochs 40

Every method is tuned on one half of the images. Its best point runs on the other half, with other
seeds. A seed draws training images, wrong labels and images to evaluate on. Every part has a file
in ``--out``, with one row per run and seed. A flag of a setting, such as ``--decay``, replaces the
published comparisons by a single one. All ranks of a run are in one process.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from recipes.errors import RecipeError, exit_on_user_error
from recipes.experiments import ExperimentParser, Part, ResultTable, run_parts, tuning_seeds
from recipes.qsr.pictures import PICTURES
from recipes.qsr.settings import (
    ALL_DECAYS,
    GRID,
    METHODS,
    MODELS,
    OPTIMIZERS,
    OWN,
    PARALLEL,
    PARTS,
    QUICK_GRID,
    SGD_MLP,
    Grid,
    Point,
    Run,
    Setting,
    Study,
    rule,
)
from recipes.qsr.tables import summary
from recipes.qsr.task import SAMPLES
from recipes.qsr.training import Outcome, train
from recipes.rows import Row, columns, typed, where
from torchcomp.specs.checks import check_count, check_share

_QUICK_SHORTER = 20
_TASK = "schedules of averages; the columns have all settings"


@exit_on_user_error()
def main() -> None:
    """Run the comparisons, print and save their results; bad input ends in one line."""
    arguments = parse(sys.argv[1:])
    parts = {name: Part(partial(open_part, name)) for name in arguments.parts}
    arguments.only = list(parts)
    # The tables and pictures are of all files of the folder.
    last = arguments.only[-1]
    parts[last] = replace(parts[last], tables=[summary], pictures=PICTURES)
    run_parts(arguments, parts)


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line, and set ``parts``: the studies to run, by name."""
    parser = ExperimentParser(__doc__, Path(__file__).resolve().parent, PARTS, seeds=range(12))
    noise = "fraction of the training labels made random [0.2]"
    parser.add_argument("--label-noise", type=float, metavar="SHARE", help=noise)
    parser.add_argument("--model", choices=MODELS, help="[mlp]")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="[sgd]")
    parser.add_argument("--decay", choices=ALL_DECAYS, help="of the learning rate [cosine]")
    parser.add_argument("--ranks", type=int, help=f"workers [{SGD_MLP.ranks}]")
    parser.add_argument("--batch", type=int, help=f"images per step of all ranks [{SGD_MLP.batch}]")
    parser.add_argument("--epochs", type=int, help=f"passes over the images [{SGD_MLP.epochs}]")
    text = f"any of {', '.join(METHODS)} [all]"
    parser.add_argument("--methods", nargs="+", metavar="METHOD", choices=METHODS, help=text)
    parsed = parser.read(words)
    names = [field.name for field in fields(Setting) if field.name != "dataset"]
    given = {n: getattr(parsed, n) for n in (*names, "methods") if getattr(parsed, n) is not None}
    if given and parsed.only != list(PARTS):
        flag = next(iter(given)).replace("_", "-")
        raise RecipeError(
            f"--only picks published comparisons: it cannot be combined with --{flag}"
        )
    parsed.grid = QUICK_GRID if parsed.quick else GRID
    parsed.parts = {OWN: (_own_study(given),)} if given else {p: PARTS[p] for p in parsed.only}
    if parsed.quick:
        parsed.parts = {
            part: tuple(_shortened(study, given) for study in studies)
            for part, studies in parsed.parts.items()
        }
    parsed.out = parser.output_folder(parsed, published=not given)
    return parsed


def _own_study(given: dict[str, Any]) -> Study:
    """Return the study of a setting that the command line describes."""
    for name in ("ranks", "batch", "epochs"):
        if name in given:
            check_count(f"--{name}", given[name])
    if "label_noise" in given:
        check_share("--label-noise", given["label_noise"])
    setting = replace(SGD_MLP, **{name: given[name] for name in given if name != "methods"})
    setting.check(SAMPLES)
    # A method that is named twice runs once.
    return Study(setting, tuple(dict.fromkeys(given.get("methods", METHODS))), curves=True)


def _shortened(study: Study, given: dict[str, Any]) -> Study:
    epochs = given.get("epochs", max(2, study.setting.epochs // _QUICK_SHORTER))
    return replace(study, setting=replace(study.setting, epochs=epochs))


def open_part(name: str, arguments: argparse.Namespace) -> Callable[[], None]:
    """Return what runs the studies of a part."""
    table = ResultTable(
        arguments.out / f"{name}.csv",
        *(columns(Run), columns(Outcome), _TASK),
        resume=arguments.resume,
        curve=("step", "accuracy"),
        curve_of=(*columns(Setting), "method", "seed"),
    )
    seeds, grid = arguments.seeds, arguments.grid
    tuning = tuning_seeds(seeds, grid.seeds)

    def measure() -> None:
        for study in arguments.parts[name]:
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

    best = {PARALLEL: tuned(PARALLEL)}
    peak = best[PARALLEL].lr
    for method in study.methods:
        if method != PARALLEL:
            best[method] = tuned(method, peak)
        measured(table, setting, best[method], seeds, "test", curve=study.curves)
    if study.map:
        for h_base, ratio in itertools.product(grid.map_bases, grid.map_ratios):
            point = replace(best["QSR"], schedule=rule(2, peak * ratio, h_base))
            measured(table, setting, point, tuning, "validation")


def measured(
    table: ResultTable,
    setting: Setting,
    point: Point,
    seeds: Sequence[int],
    part: str,
    *,
    curve: bool = False,
) -> list[Row]:
    """Return the rows of a point; train the seeds that the table lacks, side by side."""
    runs = [Run(setting, point, seed, part) for seed in seeds]
    if missing := table.missing(runs):
        found = train(setting, point, [run.seed for run in missing], part, curve=curve)
        for run, (outcome, readings) in zip(missing, found, strict=True):
            table.add(run, outcome, readings)
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
