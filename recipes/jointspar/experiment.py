"""JointSpar: bandit, convergence, accuracy, wall-clock time.

    python -m recipes.jointspar.experiment
    python -m recipes.jointspar.experiment --quick
    python -m recipes.jointspar.experiment --resume
    python -m recipes.jointspar.experiment --only bandit convergence
    python -m recipes.jointspar.experiment --seeds 8,9,10

The whole takes an hour on two cores. ``--only`` picks parts; ``python -m recipes.jointspar.bandit``
is the same as ``--only bandit``. ``--seeds`` is for bandit, convergence and large_batch,
which uses the first five. ``wall_clock`` needs root for network namespaces, and is skipped for
other users. It uses the results of ``large_batch``.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.errors import exit_on_user_error
from recipes.experiments import ExperimentParser, Part, run_parts
from recipes.image_data.sources import PUBLIC
from recipes.jointspar.bandit import open_bandit
from recipes.jointspar.convergence import OPTIMIZERS, open_convergence
from recipes.jointspar.large_batch import open_large_batch
from recipes.jointspar.pictures import PICTURES
from recipes.jointspar.tables import TABLES, accuracy_table
from recipes.jointspar.wall_clock import DELAY_US, MBIT, open_wall_clock
from torchcomp.specs.checks import check_count

_SHOWN = {
    "bandit": (open_bandit, ["bandit"]),
    "convergence": (open_convergence, ["convergence_sgd", "convergence_lars"]),
    "large_batch": (open_large_batch, ["accuracy", "probabilities"]),
    "wall_clock": (open_wall_clock, []),
}
PARTS = {
    name: Part(
        start,
        [TABLES[name]] if name in TABLES else [accuracy_table] if name == "large_batch" else [],
        {picture: PICTURES[picture] for picture in pictures},
    )
    for name, (start, pictures) in _SHOWN.items()
}


@exit_on_user_error()
def main(words: Sequence[str]) -> None:
    """Run the parts one after another. The first part that fails ends the experiment."""
    run_parts(parse(words), PARTS)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    home = Path(__file__).resolve().parent
    parser = ExperimentParser(__doc__, home, PARTS, seeds=range(8), quick_seeds=(0,))
    add = parser.add_argument_group("convergence").add_argument
    text = "compared with dense, such as 'jointspar(0.5)' [the six of the page]"
    add("--methods", nargs="+", metavar="METHOD", help=text)
    add("--optimizers", nargs="+", choices=OPTIMIZERS, help="[both]")
    add("--workers", nargs="+", type=int, metavar="N", help="simulated ranks [2 4 8; quick: 4]")
    add("--processes", type=int, default=os.cpu_count(), help="runs at a time [one per core]")
    add = parser.add_argument_group("large_batch").add_argument
    add("--dataset", choices=PUBLIC, default="digits", help="[digits]")
    add("--data", type=Path, help="folder of the data set; digits needs none")
    add("--network", default="mlp", help="mlp, or a model as in recipes.train [mlp]")
    add = parser.add_argument_group("wall_clock").add_argument
    add("--mbit", type=int, default=MBIT, help=f"of every link [{MBIT}]")
    add("--delay-us", type=int, default=DELAY_US, help=f"one-way delay [{DELAY_US}]")
    add("--steps", type=int, help="steps of a run [as in large_batch]")
    usual = parser.parse_args([])
    parsed = parser.read(words)
    own = ("methods", "workers", "dataset", "network", "mbit", "delay_us", "steps")
    published = all(getattr(parsed, name) == getattr(usual, name) for name in own)
    parsed.out = parser.output_folder(parsed, published=published)
    for name, least in (("processes", 1), ("mbit", 1), ("delay_us", 0)):
        check_count(f"--{name.replace('_', '-')}", getattr(parsed, name), least)
    for workers in parsed.workers or ():
        check_count("--workers", workers)
    # A value that is named twice is run once.
    parsed.workers = list(dict.fromkeys(parsed.workers or ()))
    parsed.optimizers = list(dict.fromkeys(parsed.optimizers or OPTIMIZERS))
    if "--only" not in words and os.geteuid() != 0:
        print("wall_clock is skipped: network namespaces need root")
        parsed.only.remove("wall_clock")
    return parsed


if __name__ == "__main__":
    main(sys.argv[1:])
