"""All experiments on JointSpar, one after another.

    python -m recipes.jointspar.experiment                  # half an hour on two cores
    python -m recipes.jointspar.experiment --only bandit backward
    python -m recipes.jointspar.experiment --resume         # go on with what large_batch.csv lacks

Each is a script of its own, which says what it measures; files go to ``results``. The last needs
root for network namespaces, and is left out elsewhere.
"""

import argparse
import os
import subprocess
import sys

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
        command = [sys.executable, "-m", f"recipes.jointspar.{part}"]
        if part == "large_batch" and arguments.resume:
            command.append("--resume")
        status = subprocess.run(command).returncode
        if status:
            sys.exit(status)


if __name__ == "__main__":
    main()
