"""Shared parts of the experiments: their flags, and result tables that can be resumed.

Each method's folder has one entry point, ``experiment.py``. :class:`ExperimentParser` gives it the
flags ``--seeds``, ``--quick``, ``--resume``, ``--out`` and, if it has several parts, ``--only``.
:class:`ResultTable` is a CSV file that grows by one row per finished run.
"""

import argparse
import itertools
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NoReturn

from recipes.errors import RecipeError
from recipes.result_files import provenance, read_csv, read_notes, write_csv

PROVENANCE = ("command", "versions", "date")
"""The last columns of a table: how, with what and when (UTC) the row was measured."""
_FIRST_TUNING_SEED = 1000
# All generators of random numbers take seeds of 32 bits.
_LARGEST_SEED = 2**32 - 1
QUICK_HELP = "a few small runs, two minutes or so on two cores, to see that it works"
RESUME_HELP = "keep the finished rows of an interrupted run, and compute only the missing ones"


class ExperimentParser(argparse.ArgumentParser):
    """A parser with the flags that all experiments have.

    Args:
        description: one line for ``--help``.
        home: folder of the method, such as ``recipes/qsr``.
        parts: what ``--only`` can pick; without parts there is no such flag.
        seeds: the default of ``--seeds``, with which the committed results were measured.
        quick_seeds: its default with ``--quick``.
    """

    def __init__(
        self,
        description: str,
        home: Path,
        parts: Sequence[str] = (),
        *,
        seeds: Sequence[int] = (0, 1, 2, 3, 4),
        quick_seeds: Sequence[int] = (0, 1),
    ) -> None:
        super().__init__(description=description, allow_abbrev=False)
        self._home, self._parts = home, parts
        self._seeds, self._quick_seeds = tuple(seeds), tuple(quick_seeds)
        usual, quick = (",".join(map(str, each)) for each in (seeds, quick_seeds))
        self.add_argument(
            "--seeds",
            type=seed_list,
            metavar="LIST",
            help=f"seeds of the reported runs, such as 3,7,11 [{usual}; with --quick: {quick}]",
        )
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

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse the command line, and set ``seeds`` (a tuple) and ``only`` (a list) if not given.

        Raises:
            RecipeError: if the command line is invalid.
        """
        parsed = self.parse_args(words)
        if parsed.seeds is None:
            parsed.seeds = self._quick_seeds if parsed.quick else self._seeds
        if self._parts:
            # In the order of the parts, and a part that is named twice runs once.
            parsed.only = [part for part in self._parts if part in (parsed.only or self._parts)]
        return parsed

    def output_folder(self, parsed: argparse.Namespace, *, published: bool = True) -> Path:
        """Return the folder that the flags name.

        Args:
            parsed: what :meth:`read` returned.
            published: whether the method's own flags are those of the committed results. If they
                are not, or if ``--seeds`` differs, the default folder is ``runs/<method>``.

        Raises:
            RecipeError: if ``--quick`` would overwrite the committed results.
        """
        results = self._home / "results"
        if parsed.out is None:
            if parsed.quick:
                return self._quick_folder
            same = published and parsed.seeds == self._seeds
            return results if same else Path("runs") / self._home.name
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


def seed_list(text: str) -> tuple[int, ...]:
    """Return the seeds of a comma-separated list, without repetitions, in the order given.

    Raises:
        argparse.ArgumentTypeError: unless all are integers from 0 to 2^32 - 1.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) <= _LARGEST_SEED for word in words):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be integers from 0 to {_LARGEST_SEED}, separated by commas, "
            "such as 3,7,11"
        )
    return tuple(dict.fromkeys(map(int, words)))


def tuning_seeds(reported: Collection[int], count: int) -> tuple[int, ...]:
    """Return ``count`` seeds that are not reported: a reported run must choose no setting."""
    unused = (seed for seed in itertools.count(_FIRST_TUNING_SEED) if seed not in reported)
    return tuple(itertools.islice(unused, count))


class ResultTable:
    """A CSV file with one row per finished run.

    The file is rewritten after every row, so an interrupted experiment loses only the run that it
    was computing. ``# task:`` above the header names the settings that all rows share. The last
    three columns of every row are :data:`PROVENANCE`, so rows of several sessions stay apart.

    Args:
        path: of the CSV file.
        header: its columns, without :data:`PROVENANCE`.
        task: the settings that all rows share. Rows of another task cannot be compared with them.
        resume: whether to keep the rows that the file already has.
        curves: whether the rows are points of curves. They have no columns of :data:`PROVENANCE`,
            which their run has in its own table.

    Attributes:
        rows: the finished rows, as texts by column.

    Raises:
        RecipeError: if ``resume`` is set and the file is damaged, or has another task or other
            columns.
    """

    def __init__(
        self,
        path: Path,
        header: Sequence[str],
        task: str,
        *,
        resume: bool,
        curves: bool = False,
    ) -> None:
        self.path, self._task = path, task
        self._provenance = {} if curves else provenance()
        self.header = (*header, *self._provenance)
        self.rows: list[dict[str, str]] = []
        # A missing file is no error: a part that was never started has no rows yet.
        if resume and path.exists():
            self._read(task)

    def add(self, *rows: Sequence[object]) -> None:
        """Append finished rows, given without their :data:`PROVENANCE`, and save the table."""
        for row in rows:
            cells = (*map(str, row), *self._provenance.values())
            self.rows.append(dict(zip(self.header, cells, strict=True)))
        self.save()

    def save(self) -> None:
        """Write the file."""
        rows = [list(row.values()) for row in self.rows]
        # A process that is killed while it writes leaves the old file as it was.
        unfinished = self.path.with_suffix(".tmp")
        write_csv(unfinished, self.header, rows, task=self._task)
        unfinished.replace(self.path)

    def _read(self, task: str) -> None:
        found = read_notes(self.path).get("task", "unknown settings")
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
        self.rows = rows


def _only_help(parts: Sequence[str]) -> str:
    return f"run only these parts, of {', '.join(parts)} [all]"
