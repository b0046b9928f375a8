"""JointSpar: bandit, bytes of a selection, backward time, convergence, accuracy, wall-clock time.

    python -m recipes.jointspar.experiment
    python -m recipes.jointspar.experiment --quick
    python -m recipes.jointspar.experiment --resume
    python -m recipes.jointspar.experiment --only bandit backward
    python -m recipes.jointspar.experiment --seeds 8,9,10

The whole takes an hour on two cores. Each part is a program that can also be run separately.
``--seeds`` is for bandit, selection, convergence and large_batch (five seeds by default).
``wall_clock`` needs root for network namespaces, and is skipped for other users. It uses the
results of ``large_batch``.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from recipes.errors import exit_on_user_error
from recipes.experiments import ExperimentParser
from recipes.jointspar import backward, bandit, convergence, large_batch, selection, wall_clock
from recipes.jointspar.parts import HOME, QUICK_SEEDS, SEEDS
from recipes.result_files import make_folder

PARTS = {
    "bandit": bandit,
    "selection": selection,
    "backward": backward,
    "convergence": convergence,
    "large_batch": large_batch,
    "wall_clock": wall_clock,
}


@exit_on_user_error()
def main() -> None:
    """Run the parts one after another. The first part that fails ends the experiment."""
    arguments = parse(sys.argv[1:])
    flags = ["--out", str(_short(arguments.out))]
    flags += ["--seeds", ",".join(map(str, arguments.seeds))] if arguments.seeds else []
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
    summary = __doc__.splitlines()[0]
    parser = ExperimentParser(summary, HOME, tuple(PARTS), seeds=SEEDS, quick_seeds=QUICK_SEEDS)
    parsed = parser.read(words)
    parsed.out = parser.output_folder(parsed)
    # Each part has its own default.
    parsed.seeds = parser.parse_args(words).seeds
    if parsed.only == list(PARTS) and os.geteuid() != 0:
        print("wall_clock is skipped: network namespaces need root")
        parsed.only.remove("wall_clock")
    return parsed


def _short(path: Path) -> Path:
    """Return a path below this folder as a relative one: it is in the command of every row."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


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
