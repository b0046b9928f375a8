"""2Direction compared with EF21-P + DIANA, accelerated gradient descent and others.

python -m recipes.two_direction.experiment --quick
python -m recipes.two_direction.experiment --dataset cifar10 --data FOLDER
"""

import argparse
import sys
from pathlib import Path

from recipes.errors import exit_on_user_error
from recipes.experiments import ExperimentParser, Part, run_parts
from recipes.two_direction.contest import QUICK_WORKERS, WORKERS, open_contest
from recipes.two_direction.data_sets import DATASETS
from recipes.two_direction.pictures import picture


@exit_on_user_error()
def main() -> None:
    """Run the contest, print and save its results; bad input ends in one line."""
    arguments = parse(sys.argv[1:])
    names = [
        f"contest_{arguments.dataset}_n{n}" for n in (QUICK_WORKERS if arguments.quick else WORKERS)
    ]
    part = Part(open_contest, pictures={name: picture(name) for name in names})
    run_parts(arguments, {"contest": part})


def parse(words: list[str]) -> argparse.Namespace:
    parser = ExperimentParser(__doc__, Path(__file__).resolve().parent, ("contest",))
    parser.add_argument("--dataset", choices=DATASETS, default="digits", help="[digits]")
    parser.add_argument("--data", type=Path, help="torchvision's root folder of cifar10")
    parsed = parser.read(words)
    parsed.out = parser.output_folder(parsed)
    return parsed


if __name__ == "__main__":
    main()
