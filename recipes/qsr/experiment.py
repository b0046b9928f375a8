"""QSR compared with the synchronisation schedules of its paper, on a small task.

    python -m recipes.qsr.experiment               # digits, 4 ranks, 5 seeds
    python -m recipes.qsr.experiment --quick
    python -m recipes.qsr.experiment --resume
    python -m recipes.qsr.experiment --dataset cifar10 --data ARCHIVE

Ranks are processes over gloo that train through ``torchcomp.LocalSGD``. Every method is tuned on
validation images, with seeds used for nothing else. Then its best schedule runs with every seed and
is evaluated on test images. The files in ``--out`` are ``runs.csv`` (every run, saved as it ends),
``results.csv``, ``tuning.csv``, ``schedules.png`` and ``accuracy.png``.
"""

import argparse
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

from recipes.errors import RecipeError, exit_on_user_error
from recipes.experiments import ExperimentParser
from recipes.qsr.comparison import METHODS, Comparison, Entry, Grid
from recipes.qsr.figures import draw_accuracy, draw_schedules
from recipes.qsr.ledger import open_table
from recipes.qsr.local_training import Length
from recipes.qsr.processes import on_processes
from recipes.qsr.task import LABEL_NOISE, open_task
from recipes.result_files import make_folder, write_csv
from torchcomp.checks import check_count, check_share

_HERE = Path(__file__).resolve().parent
RANKS = 4
LENGTHS = {"digits": Length(32, 160, 8), "cifar10": Length(256, 100, 5)}
QUICK_EPOCHS = {"epochs": 6, "warmup_epochs": 1}
QUICK_GRID = Grid(lrs=(0.1,), seeds=(1000,))


@exit_on_user_error()
def main() -> None:
    """Run the comparison, print and save its results; bad input ends in one line."""
    arguments = parse(sys.argv[1:])
    started = time.monotonic()
    data = (arguments.dataset, arguments.label_noise)
    # All input is checked before any process starts and before any file is written.
    open_task(arguments.dataset, arguments.data, arguments.label_noise)
    runs = open_table(
        arguments.out, *data, arguments.ranks, arguments.length, resume=arguments.resume
    )
    make_folder(arguments.out)
    comparison = on_processes(arguments, runs)
    print(f"\n{table(comparison)}\n")
    save(comparison, arguments.out)
    print(f"tables and pictures are in {arguments.out}")
    if runs.rows:
        print(f"{len(runs.rows)} finished runs were kept")
    print(f"total time: {time.monotonic() - started:.0f} s")


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = _parser()
    parsed = parser.parse_args(words)
    # A method that is named twice runs once.
    parsed.methods = list(dict.fromkeys(parsed.methods))
    for name in ("seeds", "epochs", "ranks"):
        value = getattr(parsed, name)
        if value is not None:
            check_count(f"--{name}", value)
    if parsed.label_noise is not None:
        check_share("--label-noise", parsed.label_noise)
    _fill(parsed)
    length = parsed.length
    if length.epochs <= length.warmup_epochs:
        raise RecipeError(
            f"--epochs {length.epochs}: expected more than the {length.warmup_epochs} of warm-up"
        )
    if length.batch % parsed.ranks:
        raise RecipeError(
            f"--ranks {parsed.ranks}: expected a divisor of the batch of {length.batch} images"
        )
    parsed.out = parser.output_folder(parsed, published=_is_published(parsed))
    return parsed


def _parser() -> ExperimentParser:
    parser = ExperimentParser(__doc__.splitlines()[0], _HERE)
    parser.add_argument("--dataset", choices=LABEL_NOISE, default="digits", help="[digits]")
    parser.add_argument("--data", type=Path, help="cifar10: its python archive")
    parser.add_argument("--label-noise", type=float, help="[digits: 0.2; cifar10: 0]")
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(METHODS), help="[all]"
    )
    parser.add_argument("--seeds", type=int, help="runs of every tuned method [5; quick: 2]")
    parser.add_argument("--epochs", type=int, help="of every run [160; cifar10: 100; quick: 6]")
    parser.add_argument("--ranks", type=int, default=RANKS, help=f"processes [{RANKS}]")
    return parser


def _fill(parsed: argparse.Namespace) -> None:
    """Set what the flags leave open."""
    whole = LENGTHS[parsed.dataset]
    length = replace(whole, **QUICK_EPOCHS) if parsed.quick else whole
    parsed.length = replace(length, epochs=parsed.epochs or length.epochs)
    parsed.grid = QUICK_GRID if parsed.quick else Grid()
    parsed.seeds = parsed.seeds or (2 if parsed.quick else 5)
    usual = LABEL_NOISE[parsed.dataset]
    parsed.label_noise = usual if parsed.label_noise is None else parsed.label_noise


def _is_published(parsed: argparse.Namespace) -> bool:
    """Return whether the flags are those of the committed results."""
    same = parsed.dataset == "digits" and parsed.label_noise == LABEL_NOISE["digits"]
    long = parsed.length == LENGTHS["digits"] and parsed.grid == Grid() and parsed.seeds == 5
    return same and long and parsed.ranks == RANKS and parsed.methods == list(METHODS)


def table(comparison: Comparison) -> str:
    """Return the results as text."""
    lines = [
        f"{'method':<11}{'accuracy, %':>15}{'- parallel':>15}{'syncs':>8}{'share':>8}{'MB':>8}"
        "  schedule"
    ]
    for entry in comparison.entries:
        share = entry.syncs / comparison.total_steps
        lines.append(
            f"{entry.method:<11}{_spread(entry.accuracy, entry.deviation):>15}"
            f"{_spread(*_against_parallel(comparison, entry)):>15}{entry.syncs:>8,}{share:>8.1%}"
            f"{entry.nbytes / 1e6:>8.1f}  {entry.schedule}"
        )
    lines.append(
        f"{comparison.total_steps:,} steps, {comparison.warmup_steps:,} of warm-up; peak lr "
        f"{comparison.peak:g}; MB that a rank sends; - parallel: difference and its standard "
        "error, paired by seed"
    )
    return "\n".join(lines)


def _against_parallel(comparison: Comparison, entry: Entry) -> tuple[float, float]:
    parallel = comparison.entry("parallel")
    return entry.ahead_of(parallel) if parallel else (math.nan, math.nan)


def _spread(middle: float, spread: float) -> str:
    return "-" if math.isnan(middle) else f"{middle:.2f} ± {spread:.2f}"


def save(comparison: Comparison, folder: Path) -> None:
    """Write tables and pictures."""
    common = {
        "dataset": comparison.dataset,
        "label_noise": comparison.label_noise,
        "steps": comparison.total_steps,
        "warmup_steps": comparison.warmup_steps,
    }
    header = [*common, "method", "schedule", "lr", "mean", "deviation", "ahead", "error", "loss"]
    header += ["syncs", "bytes"]
    rows = []
    for entry in comparison.entries:
        numbers = [entry.accuracy, entry.deviation, *_against_parallel(comparison, entry)]
        shown = [f"{number:.3f}" for number in numbers]
        named = [*common.values(), entry.method, entry.schedule, entry.lr]
        rows.append([*named, *shown, f"{entry.loss:.4f}", entry.syncs, entry.nbytes])
    write_csv(folder / "results.csv", header, rows)
    tried = [
        [
            *(trial.method, trial.schedule, trial.lr, f"{trial.accuracy:.3f}"),
            *(f"{trial.loss:.4f}", trial.syncs, trial.nbytes),
        ]
        for trial in comparison.trials
    ]
    header = ["method", "schedule", "lr", "validation", "validation_loss", "syncs", "bytes"]
    write_csv(folder / "tuning.csv", header, tried)
    draw_schedules(comparison, folder / "schedules.png")
    draw_accuracy(comparison, folder / "accuracy.png")


if __name__ == "__main__":
    main()
