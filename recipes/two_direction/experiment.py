"""2Direction compared with EF21-P + DIANA, accelerated gradient descent and others.

    python -m recipes.two_direction.experiment
    python -m recipes.two_direction.experiment --quick
    python -m recipes.two_direction.experiment --resume
    python -m recipes.two_direction.experiment --only contest --dataset cifar10 --data FOLDER

The parts are

* contest: what a worker sends and receives in softmax regression until f is within a gap of its
  infimum, by regulariser and number of workers (``contest.py``).
* alpha: the same by size of the downlink messages, and by their price, with 2Direction's
  probability for that price (``contest.py``).
* winners: on quadratics, which method sends least by condition number and omega
  (``quadratics.py``).

Each method uses its best step size 2^i, found with seeds that are not reported (``race.py``). Each
part writes its table as a CSV file and draws its picture from it.
"""

import argparse
import sys
from pathlib import Path

from recipes.errors import exit_on_user_error
from recipes.experiments import ExperimentParser, Part, run_parts
from recipes.two_direction import contest, pictures, quadratics
from recipes.two_direction.data_sets import DATASETS
from recipes.two_direction.methods import METHODS
from torchcomp.specs.checks import check_at_least_0, check_count, check_positive

PARTS = {
    "contest": Part(contest.open_contest),
    "alpha": Part(contest.open_alpha),
    "winners": Part(quadratics.open_winners, pictures={"winners": pictures.winners}),
}
_HERE = Path(__file__).resolve().parent
# A step size 2^i and its inverse are normal floats up to this i.
_LARGEST_POWER = 1022
_QUICK_GAP, _QUICK_POWERS = 1e-1, range(-1, 7)


@exit_on_user_error()
def main() -> None:
    """Run the parts, print and save their results; bad input ends in one line."""
    arguments = parse(sys.argv[1:])
    run_parts(arguments, PARTS)
    if "contest" in arguments.only:
        for n in arguments.workers:
            name = f"contest_{arguments.dataset}_n{n}"
            pictures.contest(name, arguments.out, arguments.out / f"{name}.png")


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = _parser()
    parsed = parser.read(words)
    _check_flags(parsed)
    # A table holds races of several mu, numbers of workers and methods.
    options = (parsed.gap, parsed.budget, parsed.powers, parsed.k)
    parsed.out = parser.output_folder(parsed, published=all(own is None for own in options))
    if parsed.quick:
        parsed.gap, parsed.powers = parsed.gap or _QUICK_GAP, parsed.powers or _QUICK_POWERS
        parsed.workers, parsed.mu = parsed.workers or [10], parsed.mu or [0.0, 1e-2]
        parsed.methods = parsed.methods or contest.PAPER
    # A value that is named twice runs once.
    parsed.workers = list(dict.fromkeys(parsed.workers or contest.WORKERS))
    parsed.mu = list(dict.fromkeys(contest.MUS if parsed.mu is None else parsed.mu))
    parsed.methods = list(dict.fromkeys(parsed.methods or ()))
    return parsed


def _parser() -> ExperimentParser:
    parser = ExperimentParser(__doc__, _HERE, PARTS)
    group = parser.add_argument_group("contest")
    group.add_argument("--dataset", choices=DATASETS, default="digits", help="[digits]")
    group.add_argument("--data", type=Path, help="torchvision's root folder of cifar10")
    group.add_argument("--workers", type=int, nargs="+", help="n, with equal shards [10 100]")
    group.add_argument("--mu", type=float, nargs="+", help="regulariser [0 1e-4 1e-3 1e-2]")
    group.add_argument("--k", type=int, help="values of a compressed message [d/10]")
    group.add_argument("--gap", type=float, help="f - f* to reach [1e-6, and 1e-3 for mu = 0]")
    group.add_argument("--budget", type=int, help="coordinates that a run can send [1e6]")
    group.add_argument(
        "--powers",
        nargs=2,
        metavar=("LOW", "HIGH"),
        type=int,
        help="step sizes to try: 2^LOW to 2^HIGH [-4 8, and 0 16 for mu = 0]",
    )
    group.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        choices=METHODS,
        help=f"some of: {'; '.join(METHODS)} [all]",
    )
    return parser


def _check_flags(parsed: argparse.Namespace) -> None:
    for value in parsed.workers or ():
        check_count("--workers", value)
    for name in ("k", "budget"):
        if (value := getattr(parsed, name)) is not None:
            check_count(f"--{name}", value)
    for value in parsed.mu or ():
        check_at_least_0("--mu", value)
    if parsed.gap is not None:
        check_positive("--gap", parsed.gap)
    if parsed.powers:
        low, high = parsed.powers
        check_count("--powers LOW", low, -_LARGEST_POWER, _LARGEST_POWER)
        check_count("--powers HIGH", high, low, _LARGEST_POWER)
        parsed.powers = range(low, high + 1)


if __name__ == "__main__":
    main()
