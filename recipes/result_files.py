"""Result files: folders, and CSV tables with the command that wrote them."""

import csv
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

import torch

import torchcomp
from recipes.errors import RecipeError


def make_folder(path: Path) -> None:
    """Create the folder of ``--out``. Programs call this before their first measurement."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError(
            f"--out {path} must be a folder; it could not be created ({error.strerror})"
        ) from None
    # An existing folder can belong to another user.
    if not os.access(path, os.W_OK | os.X_OK):
        raise RecipeError(f"--out {path}: no permission to write there; choose another folder")


def write_csv(
    path: Path, header: Sequence[str], rows: Iterable[Sequence[object]], **notes: str
) -> None:
    """Write a CSV file. Its first lines are comments: the ``notes``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        file.writelines(f"# {key}: {text}\n" for key, text in notes.items())
        # The default is CRLF, which diff tools show as ^M.
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def read_csv(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table. Each row maps columns to values."""
    with path.open(newline="") as file:
        reader = csv.reader(line for line in file if not line.startswith("#"))
        header, *rows = [cells for cells in reader if cells] or [[]]
    for number, row in enumerate(rows, 1):
        if len(row) != len(header):
            raise RecipeError(
                f"{path}: row {number} has {len(row)} cells for {len(header)} columns. Remove "
                "that row, or choose another folder with --out"
            )
    return [dict(zip(header, row, strict=True)) for row in rows]


def read_notes(path: Path) -> dict[str, str]:
    """Return the comments of a table, such as ``# task: ...``, by key."""
    # A file that is no text has no notes.
    with path.open(errors="replace") as file:
        comments = [line[1:].partition(":") for line in file if line.startswith("#")]
    return {key.strip(): text.strip() for key, _, text in comments}


def provenance() -> dict[str, str]:
    """Return the command, the versions and the date (UTC) of this program."""
    # With -m, argv[0] is the full path of the module. Its last three parts are the module's name.
    # The rest is private: it shows where the user keeps the repository.
    module = ".".join(Path(sys.argv[0]).with_suffix("").parts[-3:])
    ours = f"torchcomp {torchcomp.__version__} at {revision()}"
    python = f"Python {platform.python_version()}, {platform.machine()}"
    return {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "versions": f"{ours}, torch {torch.__version__}, {python}",
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
    }


@cache
def revision() -> str:
    """Return the commit of the code, with a + if files differ from it; without git "unknown"."""
    here = Path(__file__).parent
    # --exclude=* ignores tags, so that the result is always a commit.
    command = ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        described = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:  # a copy of the repository on a machine without git
        described = ""
    return described or "unknown"
