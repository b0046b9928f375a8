"""Bidirectional TopK: its counterexample, and traffic and accuracy of 2 to 100 workers.

    python -m recipes.bidirectional_topk.experiment --quick
    python -m recipes.bidirectional_topk.experiment --only union accuracy --resume
    python -m recipes.bidirectional_topk.experiment --dataset mnist --data FOLDER

The experiments are those of Zou's thesis (2022). ``counterexample`` runs on three processes; if a
number differs from the thesis's, the exit status is 1. The other parts simulate N workers in one
process, with batches of 10 and K = 0.001 d.
"""

import argparse
import sys
from pathlib import Path

from recipes.bidirectional_topk.counterexample import open_counterexample
from recipes.bidirectional_topk.pictures import PICTURES
from recipes.bidirectional_topk.problems import DATASETS
from recipes.bidirectional_topk.runs import open_accuracy, open_lr_inside, open_union
from recipes.bidirectional_topk.tables import TABLES
from recipes.errors import exit_on_user_error
from recipes.experiments import ExperimentParser, Part, run_parts
from torchcomp.specs.checks import check_count

_SHOWN = {
    "counterexample": (open_counterexample, ("counterexample_values", "counterexample_scan")),
    "union": (open_union, ("unions", "savings", "growths")),
    "accuracy": (open_accuracy, ("accuracy", "differences")),
    "lr_inside": (open_lr_inside, ("lr_inside",)),
}
PARTS = {
    name: Part(
        start, [TABLES[each] for each in tables], {name: PICTURES[name]} if name in PICTURES else {}
    )
    for name, (start, tables) in _SHOWN.items()
}


@exit_on_user_error()
def main() -> None:
    """Run the parts, print and save their results; bad input ends in one line."""
    run_parts(parse(sys.argv[1:]), PARTS)


def parse(words: list[str]) -> argparse.Namespace:
    home = Path(__file__).resolve().parent
    parser = ExperimentParser(__doc__, home, PARTS, seeds=range(10))
    names = ", ".join(DATASETS)
    parser.add_argument(
        "--dataset", choices=DATASETS, default="digits", metavar="NAME", help=f"{names} [digits]"
    )
    parser.add_argument("--data", type=Path, help="folder of the data set; digits needs none")
    parser.add_argument("--processes", type=int, default=2, help="measurements at a time [2]")
    parsed = parser.read(words)
    check_count("--processes", parsed.processes)
    # The committed results are of the digits.
    parsed.out = parser.output_folder(parsed, published=parsed.dataset == "digits")
    return parsed


if __name__ == "__main__":
    main()
