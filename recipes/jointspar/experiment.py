"""JointSpar: bandit, bytes of a selection, backward time, accuracy, wall-clock time.

    python -m recipes.jointspar.experiment
    python -m recipes.jointspar.experiment --quick
    python -m recipes.jointspar.experiment --resume
    python -m recipes.jointspar.experiment --only bandit backward

The whole takes half an hour on two cores. Each part is a program that can also be run separately.
``wall_clock`` needs root for network namespaces, and is skipped for other users. It uses the
results of ``large_batch``.
"""

import argparse
import os
import subprocess
import sys

from recipes.errors import exit_on_user_error
from recipes.experiments import ExperimentParser
from recipes.jointspar import backward, bandit, large_batch, selection, wall_clock
from recipes.jointspar.parts import HOME
from recipes.result_files import make_folder

PARTS = {
    "bandit": bandit,
    "selection": selection,
    "backward": backward,
    "large_batch": large_batch,
    "wall_clock": wall_clock,
}


@exit_on_user_error()
def main() -> None:
    """Run the parts one after another. The first part that fails ends the experiment."""
    arguments = parse(sys.argv[1:])
    flags = ["--out", str(arguments.out)]
    flags += ["--quick"] if arguments.quick else []
    flags += ["--resume"] if arguments.resume else []
    check_parts(arguments.only, flags)
    make_folder(arguments.out)
    for part in arguments.only:
        print(f"\n--- {part}", flush=True)
        # A process per part: each one sets its own threads, process group and signal handlers.
        command = [sys.executable, "-m", f"recipes.jointspar.{part}", *flags]
        status = subprocess.run(command).returncode
        if status:
            sys.exit(status)


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = ExperimentParser(__doc__.splitlines()[0], HOME, tuple(PARTS))
    parsed = parser.parse_args(words)
    parsed.out = parser.output_folder(parsed)
    # A part that is named twice runs once, and wall_clock follows large_batch.
    parsed.only = [part for part in PARTS if part in (parsed.only or default_parts())]
    return parsed


def default_parts() -> list[str]:
    """Return all parts that this user can run."""
    if os.geteuid() == 0:
        return list(PARTS)
    print("wall_clock is skipped: network namespaces need root")
    return [part for part in PARTS if part != "wall_clock"]


def check_parts(parts: list[str], flags: list[str]) -> None:
    """Check every part's input, so that no part fails after another has run for minutes.

    Raises:
        RecipeError: If ``--resume`` finds the table of another task, or if there are no results of
            ``large_batch`` for ``wall_clock``.
    """
    for part in parts:
        PARTS[part].open_table(PARTS[part].parse(flags))
    if "wall_clock" in parts and "large_batch" not in parts:
        wall_clock.large_batch_rows(wall_clock.parse(flags))


if __name__ == "__main__":
    main()
