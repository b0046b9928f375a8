"""Result files: tables as CSV that say where they come from, and the plotting library."""

import csv
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import torchcomp


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table, with the command, the versions and the date as comments above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        file.writelines(f"# {line}\n" for line in provenance())
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def provenance() -> list[str]:
    """Say what made a file: command, versions, date (UTC)."""
    # From the repository's root, as the README writes it; other people's folders are not ours.
    script = "/".join(Path(sys.argv[0]).parts[-3:])
    command = shlex.join(["python", script, *sys.argv[1:]])
    versions = f"torchcomp {torchcomp.__version__}, torch {torch.__version__}"
    return [
        f"command: {command}",
        f"versions: {versions}, Python {platform.python_version()}, {platform.machine()}",
        f"date: {datetime.now(timezone.utc):%Y-%m-%d}",
    ]


def pyplot() -> Any:
    """Import matplotlib for files, without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt
