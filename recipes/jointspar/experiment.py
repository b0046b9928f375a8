"""All experiments on JointSpar, one after another.

    python recipes/jointspar/experiment.py                  # half an hour on two cores
    python recipes/jointspar/experiment.py --only bandit backward
    python recipes/jointspar/experiment.py --resume         # go on with what large_batch.csv lacks

Each is a script of its own, which says what it measures; files go to ``results``. The last needs
root for network namespaces, and is left out elsewhere.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
PARTS = ("bandit", "selection", "backward", "large_batch", "wall_clock")


def main() -> None:
    """Run the parts that are asked for; the first that fails ends it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", nargs="+", choices=PARTS, help="parts to run [all]")
    parser.add_argument("--resume", action="store_true", help="keep the runs of large_batch.csv")
    arguments = parser.parse_args()
    for part in arguments.only or PARTS:
        if part == "wall_clock" and os.geteuid() != 0 and not arguments.only:
            print("wall_clock is left out: network namespaces need root")
            continue
        print(f"\n--- {part}", flush=True)
        # Named from the repository's root, as the files that it writes will say.
        command = [sys.executable, f"recipes/jointspar/{part}.py"]
        if part == "large_batch" and arguments.resume:
            command.append("--resume")
        status = subprocess.run(command, cwd=_HERE.parents[1]).returncode
        if status:
            sys.exit(status)


if __name__ == "__main__":
    main()
