"""QSR compared with the synchronisation schedules of its paper, on small tasks.

    python -m recipes.qsr.experiment               # all published comparisons, 12 seeds
    python -m recipes.qsr.experiment --quick
    python -m recipes.qsr.experiment --only lengths decays --resume
    python -m recipes.qsr.experiment --optimizer adamw --decay linear --ranks 2 --epochs 40
    python -m recipes.qsr.experiment --dataset cifar10 --data ARCHIVE

Every method is tuned on one half of the images. Its best point runs on the other half, with other
seeds. A seed draws training images, wrong labels and images to evaluate on. Every part has a file
in ``--out``, with one row per run and seed. A flag of a setting, such as ``--decay``, replaces the
published comparisons by a single one. All ranks of a run are in one process. With ``--processes``,
they are processes over gloo that train through plain DDP and ``torchcomp.LocalSGD``, with the same
results.
"""

import argparse
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from recipes.errors import RecipeError, exit_on_user_error
from recipes.experiments import ExperimentParser
from recipes.qsr.comparison import QUICK_GRID, Grid
from recipes.qsr.figures import draw_all
from recipes.qsr.launch import run_studies
from recipes.qsr.ledger import open_tables
from recipes.qsr.results import ALL_PARTS, read_results
from recipes.qsr.settings import (
    ALL_DECAYS,
    CIFAR10,
    LABEL_NOISE,
    METHODS,
    MODELS,
    OPTIMIZERS,
    OWN,
    PARTS,
    SGD_MLP,
    Setting,
    Study,
)
from recipes.qsr.tables import summary
from recipes.qsr.task import open_task
from recipes.result_files import make_folder
from torchcomp.checks import check_count, check_share

_HERE = Path(__file__).resolve().parent
_QUICK_SHORTER = 20
_BATCH_HELP = f"images per step of all ranks [{SGD_MLP.batch}; cifar10: {CIFAR10.batch}]"
_EPOCHS_HELP = f"passes over the training images [{SGD_MLP.epochs}; cifar10: {CIFAR10.epochs}]"
_NOISE_HELP = "fraction of the training labels made random [digits: 0.2; cifar10: 0]"
_METHODS_HELP = f"any of {', '.join(METHODS)} [all]"
_SETTING_FLAGS = (*(field.name for field in fields(Setting)), "methods")


@exit_on_user_error()
def main() -> None:
    """Run the comparisons, print and save their results; bad input ends in one line."""
    arguments = parse(sys.argv[1:])
    started = time.monotonic()
    # All input is checked before any process starts and before any file is written.
    samples = training_images(arguments)
    tables = {
        part: open_tables(arguments.out, part, resume=arguments.resume) for part in arguments.parts
    }
    # The pictures are of all files of the folder, and without --resume some of them start anew.
    kept = [part for part in ALL_PARTS if arguments.resume or part not in tables]
    read_results(arguments.out, kept)
    make_folder(arguments.out)
    for part, studies in arguments.parts.items():
        run_studies(studies, arguments, tables[part])
    print(f"\n{summary(arguments.out)}\n")
    draw_all(arguments.out, samples)
    print(f"tables and pictures are in {arguments.out}")
    print(f"total time: {time.monotonic() - started:.0f} s")


def training_images(arguments: argparse.Namespace) -> int:
    """Read the data of the studies and return the number of training images."""
    # All studies of a command are of one data set.
    setting = next(study.setting for studies in arguments.parts.values() for study in studies)
    samples = open_task(setting.dataset, arguments.data, setting.label_noise).samples
    if setting.batch > samples:
        raise RecipeError(
            f"--batch {setting.batch}: expected at most the {samples:,} training images"
        )
    return samples


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line, and set ``parts``: the studies to run, by name."""
    parser = _parser()
    parsed = parser.read(words)
    own = {name: getattr(parsed, name) for name in _SETTING_FLAGS}
    given = {name: value for name, value in own.items() if value is not None}
    if given and parsed.only != list(PARTS):
        raise RecipeError(
            f"--only picks published comparisons: it cannot be combined with --{_flag(given)}"
        )
    parsed.grid = QUICK_GRID if parsed.quick else Grid()
    parsed.parts = {OWN: (_own_study(given),)} if given else {p: PARTS[p] for p in parsed.only}
    parsed.processes = parsed.processes or parsed.model == "cnn" or parsed.dataset == "cifar10"
    if parsed.quick:
        parsed.parts = {
            part: tuple(_shortened(study, given) for study in studies)
            for part, studies in parsed.parts.items()
        }
    parsed.out = parser.output_folder(parsed, published=not given and not parsed.processes)
    return parsed


def _parser() -> ExperimentParser:
    parser = ExperimentParser(
        __doc__.splitlines()[0], _HERE, tuple(PARTS), seeds=range(12), quick_seeds=(0, 1)
    )
    parser.add_argument("--dataset", choices=LABEL_NOISE, help="[digits]")
    parser.add_argument("--data", type=Path, help="cifar10: its python archive")
    parser.add_argument("--label-noise", type=float, metavar="SHARE", help=_NOISE_HELP)
    parser.add_argument("--model", choices=MODELS, help="[digits: mlp; cifar10: cnn]")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="[sgd]")
    parser.add_argument("--decay", choices=ALL_DECAYS, help="of the learning rate [cosine]")
    parser.add_argument("--ranks", type=int, help=f"workers [{SGD_MLP.ranks}]")
    parser.add_argument("--batch", type=int, help=_BATCH_HELP)
    parser.add_argument("--epochs", type=int, help=_EPOCHS_HELP)
    parser.add_argument(
        "--methods", nargs="+", metavar="METHOD", choices=METHODS, help=_METHODS_HELP
    )
    parser.add_argument(
        "--processes", action="store_true", help="ranks are processes over gloo (always for cnn)"
    )
    return parser


def _flag(given: dict[str, Any]) -> str:
    return next(iter(given)).replace("_", "-")


def _own_study(given: dict[str, Any]) -> Study:
    """Return the study of a setting that the command line describes."""
    for name in ("ranks", "batch", "epochs"):
        if name in given:
            check_count(f"--{name}", given[name])
    if "label_noise" in given:
        check_share("--label-noise", given["label_noise"])
    usual = CIFAR10 if given.get("dataset") == "cifar10" else SGD_MLP
    setting = replace(usual, **{name: given[name] for name in given if name != "methods"})
    setting.check()
    # A method that is named twice runs once.
    return Study(setting, tuple(dict.fromkeys(given.get("methods", METHODS))), curves=True)


def _shortened(study: Study, given: dict[str, Any]) -> Study:
    epochs = given.get("epochs", max(2, study.setting.epochs // _QUICK_SHORTER))
    return replace(study, setting=replace(study.setting, epochs=epochs))


if __name__ == "__main__":
    main()
