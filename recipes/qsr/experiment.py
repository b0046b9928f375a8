"""QSR beside the synchronisation schedules that its paper compares it with, on a small task.

    python -m recipes.qsr.experiment               # digits, 4 ranks, 5 seeds
    python -m recipes.qsr.experiment --resume      # go on after an interruption
    python -m recipes.qsr.experiment --quick       # a minute, to see that it works
    python -m recipes.qsr.experiment --dataset cifar10 --data ARCHIVE

Ranks are processes that talk over gloo and train through ``torchcomp.LocalSGD``. Every method is
tuned on validation images with seeds of their own and then runs with every seed. Writes
``runs.csv`` (every run, as soon as it is over), ``results.csv``, ``tuning.csv``, ``schedules.png``
and ``accuracy.png`` to ``--out``.
"""

import argparse
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

from recipes.errors import told_in_one_line
from recipes.qsr.comparison import METHODS, Comparison, Entry, Grid
from recipes.qsr.figures import draw_accuracy, draw_schedules
from recipes.qsr.ledger import read_outcomes
from recipes.qsr.local_training import Length
from recipes.qsr.processes import on_processes
from recipes.qsr.task import LABEL_NOISE, open_task
from recipes.result_files import make_folder, write_csv
from torchcomp.checks import check_count, check_share

_HERE = Path(__file__).resolve().parent
RANKS = 4
LENGTHS = {"digits": Length(32, 160, 8), "cifar10": Length(256, 100, 5)}
QUICK_EPOCHS = {"epochs": 6, "warmup_epochs": 1}
QUICK_GRID = Grid(rates=(0.1,), seeds=(1000,))


@told_in_one_line()
def main() -> None:
    """Run, show and write; bad input ends in one line."""
    arguments = parse(sys.argv[1:])
    started = time.monotonic()
    runs = arguments.out / "runs.csv"
    # Here first, so that what is missing is told before any process starts.
    open_task(arguments.dataset, arguments.data, arguments.label_noise)
    known = read_outcomes(runs) if arguments.resume else {}
    make_folder(arguments.out)
    comparison = on_processes(arguments, known)
    print(f"\n{table(comparison)}\n")
    save(comparison, arguments.out)
    print(f"tables and pictures are in {arguments.out}")
    print(f"{len(known)} runs were known; the rest took {time.monotonic() - started:.0f} s")


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="few epochs, a small grid, two seeds")
    parser.add_argument("--resume", action="store_true", help="keep the runs of OUT/runs.csv")
    parser.add_argument("--dataset", choices=LABEL_NOISE, default="digits")
    parser.add_argument("--data", type=Path, help="cifar10: its python archive")
    parser.add_argument("--label-noise", type=float, help="[digits: 0.2; cifar10: 0]")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, help="runs of every tuned method [5; quick: 2]")
    parser.add_argument("--epochs", type=int, help="length of every run [160; cifar10: 100]")
    parser.add_argument("--ranks", type=int, default=RANKS, help=f"processes [{RANKS}]")
    parser.add_argument("--out", type=Path, help="folder of the files [results; else runs/qsr]")
    parsed = parser.parse_args(words)
    # A method that is named twice is run once.
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
        parser.error(f"--epochs must exceed the {length.warmup_epochs} of warm-up")
    if length.batch % parsed.ranks:
        parser.error(f"--ranks must divide the batch of {length.batch} images")
    return parsed


def _fill(parsed: argparse.Namespace) -> None:
    whole = LENGTHS[parsed.dataset]
    length = replace(whole, **QUICK_EPOCHS) if parsed.quick else whole
    parsed.length = replace(length, epochs=parsed.epochs or length.epochs)
    parsed.grid = QUICK_GRID if parsed.quick else Grid()
    parsed.seeds = parsed.seeds or (2 if parsed.quick else 5)
    usual = LABEL_NOISE[parsed.dataset]
    parsed.label_noise = usual if parsed.label_noise is None else parsed.label_noise
    if parsed.out is None:
        parsed.out = _HERE / "results" if _is_published(parsed) else Path("runs/qsr")


def _is_published(parsed: argparse.Namespace) -> bool:
    """Whether this is what the repository shows: nothing else may overwrite it by default."""
    same = parsed.dataset == "digits" and parsed.label_noise == LABEL_NOISE["digits"]
    long = parsed.length == LENGTHS["digits"] and parsed.grid == Grid() and parsed.seeds == 5
    return same and long and parsed.ranks == RANKS and parsed.methods == list(METHODS)


def table(comparison: Comparison) -> str:
    """Return what came out, as text."""
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
        f"{comparison.total_steps:,} steps, {comparison.warmup_steps:,} of warm-up; peak rate "
        f"{comparison.peak:g}; MB that a rank sends; - parallel: difference and its standard "
        "error, paired by seed"
    )
    return "\n".join(lines)


def _against_parallel(comparison: Comparison, entry: Entry) -> tuple[float, float]:
    parallel = [other for other in comparison.entries if other.method == "parallel"]
    return entry.ahead_of(parallel[0]) if parallel else (math.nan, math.nan)


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
