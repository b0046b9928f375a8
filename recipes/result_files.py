"""Result files: tables as CSV that say where they come from, and pictures."""

import csv
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import torchcomp
from recipes.errors import RecipeError


def make_folder(path: Path) -> None:
    """Make the folder of ``--out``: before anything is measured that could not be written there.

    Raises:
        RecipeError: if it is no folder, cannot be made, or cannot be written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError(
            f"--out {path} must be a folder, and cannot be made: {error.strerror}"
        ) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise RecipeError(f"--out {path}: the files could not be written there")


def write_csv(
    path: Path, header: Sequence[str], rows: Iterable[Sequence[object]], **notes: str
) -> None:
    """Write a table, with the command, the versions, the date and ``notes`` as comments above."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        file.writelines(f"# {key}: {text}\n" for key, text in (provenance() | notes).items())
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def read_csv(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table, by column."""
    with path.open(newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def read_notes(path: Path) -> dict[str, str]:
    """Return the comments of a table by their keys: "command", "versions", "date" and others."""
    with path.open() as file:
        comments = [line[1:].partition(":") for line in file if line.startswith("#")]
    return {key.strip(): text.strip() for key, _, text in comments}


def provenance() -> dict[str, str]:
    """Say what made a file: command, versions, date (UTC)."""
    # Python puts the module's full path into argv; its last three parts name the module, and leave
    # out where the user keeps the repository.
    module = ".".join(Path(sys.argv[0]).with_suffix("").parts[-3:])
    versions = f"torchcomp {torchcomp.__version__}, torch {torch.__version__}"
    return {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "versions": f"{versions}, Python {platform.python_version()}, {platform.machine()}",
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
    }


def pyplot() -> Any:
    """Import matplotlib for files, without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def save_figure(figure: Any, path: Path, dpi: int = 110) -> None:
    """Write a figure and forget it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    pyplot().close(figure)
