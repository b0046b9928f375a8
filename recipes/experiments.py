"""Shared parts of the experiments: their flags, and result tables that can be resumed.

Each method's folder has one entry point, ``experiment.py``. :class:`ExperimentParser` gives it the
flags ``--quick``, ``--resume``, ``--out`` and, if it has several parts, ``--only``.
:class:`ResultTable` is a CSV file that grows by one row per finished run.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from recipes.errors import RecipeError
from recipes.result_files import provenance, read_csv, read_notes, write_csv

QUICK_HELP = "a few small runs, two minutes or so on two cores, to see that it works"
RESUME_HELP = "keep the finished rows of an interrupted run, and compute only the missing ones"


class ExperimentParser(argparse.ArgumentParser):
    """A parser with the flags that all experiments have.

    Args:
        description: one line for ``--help``.
        home: folder of the method, such as ``recipes/qsr``.
        parts: what ``--only`` can pick; without parts there is no such flag.
    """

    def __init__(self, description: str, home: Path, parts: Sequence[str] = ()) -> None:
        super().__init__(description=description, allow_abbrev=False)
        self._home = home
        if parts:
            self.add_argument(
                "--only", nargs="+", metavar="PART", choices=parts, help=_only_help(parts)
            )
        self.add_argument("--quick", action="store_true", help=QUICK_HELP)
        self.add_argument("--resume", action="store_true", help=RESUME_HELP)
        self.add_argument(
            "--out",
            type=Path,
            metavar="DIR",
            help=f"folder for tables and pictures [results; with --quick: {self._quick_folder}]",
        )

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage: every bad input ends in one line."""
        raise RecipeError(message)

    def output_folder(self, parsed: argparse.Namespace, *, published: bool = True) -> Path:
        """Return the folder that the flags name.

        Args:
            parsed: the parsed command line.
            published: whether the other flags are those of the committed results. If they are not,
                the default folder is ``runs/<method>``.

        Raises:
            RecipeError: if ``--quick`` would overwrite the committed results.
        """
        results = self._home / "results"
        if parsed.out is None:
            if parsed.quick:
                return self._quick_folder
            return results if published else Path("runs") / self._home.name
        out: Path = parsed.out
        if parsed.quick and out.resolve() == results.resolve():
            raise RecipeError(
                f"--quick cannot write to --out {out}, which holds the committed results: "
                "choose another folder"
            )
        return out

    @property
    def _quick_folder(self) -> Path:
        return Path("runs") / f"{self._home.name}-quick"


class ResultTable:
    """A CSV file with one row per finished run.

    The file is rewritten after every row, so an interrupted experiment loses only the run that it
    was computing. ``# task:`` above the header names the settings that all rows share.

    Args:
        path: of the CSV file.
        header: its columns.
        task: the settings that all rows share. Rows of another task cannot be compared with them.
        resume: whether to keep the rows that the file already has.

    Attributes:
        rows: the finished rows, as texts by column.

    Raises:
        RecipeError: if ``resume`` is set and the file has another task or other columns.
    """

    def __init__(self, path: Path, header: Sequence[str], task: str, *, resume: bool) -> None:
        self.path, self.header = path, tuple(header)
        # A resumed table keeps the command, versions and date of its first run.
        self._notes = provenance() | {"task": task}
        self.rows: list[dict[str, str]] = []
        # A missing file is no error: a part that was never started has no rows yet.
        if resume and path.exists():
            self._read(task)

    def add(self, *rows: Sequence[object]) -> None:
        """Append finished rows and save the table."""
        for row in rows:
            self.rows.append(dict(zip(self.header, map(str, row), strict=True)))
        self.save()

    def save(self) -> None:
        """Write the file."""
        rows = [list(row.values()) for row in self.rows]
        # A process that is killed while it writes leaves the old file as it was.
        unfinished = self.path.with_suffix(".tmp")
        write_csv(unfinished, self.header, rows, **self._notes)
        unfinished.replace(self.path)

    def _read(self, task: str) -> None:
        notes = read_notes(self.path)
        found = notes.get("task", "unknown settings")
        if found != task:
            raise RecipeError(
                f"--resume cannot use {self.path}, whose rows are of: {found}; this run is: "
                f"{task}. Choose another folder with --out, or leave out --resume"
            )
        rows = read_csv(self.path)
        if rows and tuple(rows[0]) != self.header:
            raise RecipeError(
                f"--resume cannot use {self.path}, whose columns are {', '.join(rows[0])}; "
                f"expected {', '.join(self.header)}"
            )
        self._notes, self.rows = notes, rows


def _only_help(parts: Sequence[str]) -> str:
    return f"run only these parts, of {', '.join(parts)} [all]"
