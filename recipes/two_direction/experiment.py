"""2Direction compared with EF21-P + DIANA, accelerated gradient descent and others.

    python -m recipes.two_direction.experiment
    python -m recipes.two_direction.experiment --quick
    python -m recipes.two_direction.experiment --resume
    python -m recipes.two_direction.experiment --only contest --dataset cifar10 --data FOLDER

The parts are

* contest: what a worker sends and receives in softmax regression until f is within a gap of its
  minimum (``contest.py``).
* scaling: iterations on quadratics by condition number, omega and number of workers
  (``scaling.py``).
* ranks: four real ranks over gloo, compared with the simulation bit for bit (``on_ranks.py``). The
  exit status is 1 if they differ.

In the contest, each method uses its best step size 2^i, found with seed 0, and then runs with every
seed. A seed shuffles the samples and draws the messages. If a seed does not reach the gap, the
method uses the largest of the next three smaller step sizes with which all seeds reach it, if there
is one. Each part writes its tables as CSV files and draws pictures from them.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from recipes.errors import exit_on_user_error
from recipes.experiments import ExperimentParser, ResultTable
from recipes.result_files import make_folder
from recipes.two_direction import on_ranks, scaling
from recipes.two_direction.contest import METHODS, Setting, check
from recipes.two_direction.contest_table import ContestTables, run_contest
from recipes.two_direction.data_sets import DATASETS, open_samples
from recipes.two_direction.pictures import draw_contest, draw_sweep
from recipes.two_direction.tuning import POWERS
from torchcomp.checks import check_count, check_positive

PARTS = ("contest", "scaling", "ranks")
_HERE = Path(__file__).resolve().parent
# A step size 2^i and its inverse are normal floats up to this i.
_LARGEST_POWER = 1022
WHOLE = {
    "dataset": "digits",
    "workers": 10,
    "mu": [1e-4, 1e-2],
    "k": None,
    "gap": 1e-6,
    "budget": 3_000_000,
    "every": 1,
    "powers": [POWERS[0], POWERS[-1]],
    "seeds": 5,
    "methods": list(METHODS),
}
QUICK = WHOLE | {
    "mu": [1e-2],
    "gap": 1e-2,
    "powers": [0, 5],
    "seeds": 2,
    "methods": ["2Direction", "AGD", "EF21-P + DIANA"],
}


@exit_on_user_error()
def main() -> None:
    """Run the parts, print and save their results; bad input ends in one line."""
    arguments = parse(sys.argv[1:])
    torch.set_num_threads(1)
    started = time.monotonic()
    # All input is checked before anything is computed and before any file is written.
    contests = open_contests(arguments)
    sweeps = open_sweeps(arguments)
    shared = on_ranks.setting(arguments.gap) if "ranks" in arguments.only else None
    ranks_table = (
        on_ranks.open_table(shared, arguments.out, resume=arguments.resume) if shared else None
    )
    make_folder(arguments.out)
    for setting, tables in contests:
        run_contest(setting, arguments.methods, arguments.seeds, tables)
        draw_contest(tables.results.path, tables.curves.path, setting)
    for sweep, table in sweeps:
        scaling.run_sweep(sweep, table)
        draw_sweep(table.path, sweep)
    if shared and ranks_table:
        on_ranks.run_ranks(shared, ranks_table)
    print(f"\ntables and pictures are in {arguments.out}")
    print(f"total time: {time.monotonic() - started:.0f} s")


def open_contests(arguments: argparse.Namespace) -> list[tuple[Setting, ContestTables]]:
    """Read the data and open the contest's tables, a pair for each mu."""
    if "contest" not in arguments.only:
        return []
    settings = contest_settings(arguments)
    for setting in settings:
        check(setting, arguments.methods)
    return [
        (each, ContestTables.open(each, arguments.seeds, arguments.out, resume=arguments.resume))
        for each in settings
    ]


def open_sweeps(arguments: argparse.Namespace) -> list[tuple[scaling.Sweep, ResultTable]]:
    """Open the tables of the sweeps that the flags name."""
    if "scaling" not in arguments.only:
        return []
    return [
        (sweep, scaling.open_table(sweep, arguments.out, resume=arguments.resume))
        for sweep in scaling.sweeps(quick=arguments.quick)
        if sweep.field in arguments.sweeps
    ]


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = _parser()
    parsed = parser.parse_args(words)
    for name, value in (QUICK if parsed.quick else WHOLE).items():
        if getattr(parsed, name) is None:
            setattr(parsed, name, value)
    # A value that is named twice runs once.
    parsed.only = list(dict.fromkeys(parsed.only or PARTS))
    for name in ("mu", "methods", "sweeps"):
        setattr(parsed, name, list(dict.fromkeys(getattr(parsed, name))))
    _check_flags(parsed)
    # The names of the files contain mu, so any choice of mu leaves the other files as they are.
    published = all(getattr(parsed, name) == WHOLE[name] for name in WHOLE if name != "mu")
    parsed.out = parser.output_folder(parsed, published=published)
    return parsed


def _parser() -> ExperimentParser:
    parser = ExperimentParser(__doc__.splitlines()[0], _HERE, PARTS)
    contest = parser.add_argument_group("contest; --quick has other defaults")
    contest.add_argument("--dataset", choices=DATASETS, help="[digits]")
    contest.add_argument("--data", type=Path, help="path of cifar10 or real-sim")
    contest.add_argument("--workers", type=int, help="n, with equal shards [10]")
    contest.add_argument("--mu", type=float, nargs="+", help="regulariser [1e-4 1e-2]")
    contest.add_argument("--k", type=int, help="values of a compressed message [d/10]")
    contest.add_argument("--gap", type=float, help="f - f* to reach; also for ranks [1e-6]")
    contest.add_argument("--budget", type=int, help="coordinates that a run can send [3e6]")
    contest.add_argument("--every", type=int, help="iterations between evaluations of f [1]")
    contest.add_argument(
        "--powers",
        nargs=2,
        metavar=("LOW", "HIGH"),
        type=int,
        help="step sizes to try: 2^LOW to 2^HIGH [-20 20]",
    )
    contest.add_argument("--seeds", type=int, help="runs of a method [5]")
    contest.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        choices=METHODS,
        help=f"some of: {'; '.join(METHODS)} [all]",
    )
    sweeps = parser.add_argument_group("scaling")
    sweeps.add_argument(
        "--sweeps",
        nargs="+",
        choices=scaling.SWEEPS,
        default=list(scaling.SWEEPS),
        help="quantities to vary [all]",
    )
    return parser


def _check_flags(parsed: argparse.Namespace) -> None:
    for name in ("workers", "k", "budget", "every", "seeds"):
        if (value := getattr(parsed, name)) is not None:
            check_count(f"--{name}", value)
    for value in parsed.mu:
        check_positive("--mu", value)
    check_positive("--gap", parsed.gap)
    low, high = parsed.powers
    check_count("--powers LOW", low, -_LARGEST_POWER, _LARGEST_POWER)
    check_count("--powers HIGH", high, low, _LARGEST_POWER)


def contest_settings(arguments: argparse.Namespace) -> list[Setting]:
    """Read the data, and return one setting for each mu."""
    samples = open_samples(arguments.dataset, arguments.data)
    k = max(1, samples.d // 10) if arguments.k is None else arguments.k
    low, high = arguments.powers
    limits = (k, arguments.gap, arguments.budget, arguments.every, range(low, high + 1))
    return [Setting(samples, arguments.workers, mu, *limits) for mu in arguments.mu]


if __name__ == "__main__":
    main()
