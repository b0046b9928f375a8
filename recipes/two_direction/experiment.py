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
from recipes.two_direction.quadratics import open_scaling, open_winners
from recipes.two_direction.tables import TABLES

PARTS = ("contest", "winners", "scaling")


@exit_on_user_error()
def main() -> None:
    """Run the parts, print and save their results; bad input ends in one line."""
    arguments = parse(sys.argv[1:])
    names = [
        f"contest_{arguments.dataset}_n{n}" for n in (QUICK_WORKERS if arguments.quick else WORKERS)
    ]
    parts = {
        "contest": Part(open_contest, pictures={name: picture(name) for name in names}),
        "winners": Part(open_winners, () if arguments.quick else (TABLES["wins"],)),
        "scaling": Part(open_scaling, () if arguments.quick else (TABLES["scaling"],)),
    }
    run_parts(arguments, parts)


def parse(words: list[str]) -> argparse.Namespace:
    parser = ExperimentParser(__doc__, Path(__file__).resolve().parent, PARTS)
    parser.add_argument("--dataset", choices=DATASETS, default="digits", help="[digits]")
    parser.add_argument("--data", type=Path, help="torchvision's root folder of cifar10")
    parsed = parser.read(words)
    parsed.out = parser.output_folder(parsed)
    return parsed


if __name__ == "__main__":
    main()
