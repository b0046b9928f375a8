"""JointSpar: bandit, convergence on simulated ranks, accuracy and time at equal bytes on real ones.

    python -m recipes.jointspar.experiment
    python -m recipes.jointspar.experiment --quick
    python -m recipes.jointspar.experiment --only convergence --seeds 8,9,10

It takes half an hour on two cores. ``large_batch`` uses the first five seeds. ``wall_clock`` needs
root for network namespaces, and is left out for other users.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.net.shell import missing
from recipes.errors import exit_on_user_error
from recipes.experiments import ExperimentParser, Part, run_parts
from recipes.jointspar.bandit import open_bandit
from recipes.jointspar.convergence import open_convergence
from recipes.jointspar.large_batch import open_large_batch
from recipes.jointspar.pictures import PICTURES
from recipes.jointspar.tables import TABLES
from recipes.jointspar.wall_clock import open_wall_clock
from torchcomp.specs.checks import check_count

PARTS = {
    "bandit": Part(open_bandit, [TABLES["bandit"]]),
    "convergence": Part(
        open_convergence,
        pictures=PICTURES,
    ),
    "large_batch": Part(open_large_batch, [TABLES["accuracy"]]),
    "wall_clock": Part(open_wall_clock, [TABLES["wall_clock"]]),
}


@exit_on_user_error()
def main() -> None:
    """Run the parts one after another. The first part that fails ends the experiment."""
    run_parts(parse(sys.argv[1:]), PARTS)


def parse(words: Sequence[str]) -> argparse.Namespace:
    home = Path(__file__).resolve().parent
    parser = ExperimentParser(__doc__, home, PARTS, seeds=range(8), quick_seeds=(0,))
    text = "runs at a time [one per core]"
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help=text)
    parsed = parser.read(words)
    parsed.out = parser.output_folder(parsed)
    check_count("--processes", parsed.processes)
    if parsed.only == list(PARTS) and (lacking := missing()):
        print(f"wall_clock is left out: {lacking}")
        parsed.only.remove("wall_clock")
    return parsed


if __name__ == "__main__":
    main()
