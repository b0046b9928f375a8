"""Shared parts of the experiments: their flags, their parts, and result tables that can be resumed.

Each method's folder has one entry point, ``experiment.py``. A :class:`Part` measures what its
:class:`ResultTable` lacks, and shows its tables and pictures.
"""

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from recipes.errors import RecipeError
from recipes.local_ranks import run_on_ranks
from recipes.pictures import Picture
from recipes.result_files import make_folder, provenance, read_csv, read_notes, write_csv
from recipes.rows import cells
from recipes.tables import TableMaker

PROVENANCE = ("command", "versions", "date")
"""The last columns of a table: how, with what and when (UTC) the row was measured."""
_FIRST_TUNING_SEED = 1000
# All generators of random numbers take seeds of 32 bits.
_LARGEST_SEED = 2**32 - 1
QUICK_HELP = "a few small runs, two minutes or so on two cores, to see that it works"
RESUME_HELP = "keep the finished rows of an interrupted run, and compute only the missing ones"

_Run = TypeVar("_Run")
Texts = dict[str, str]
"""A row of a file: texts by column."""


class ExperimentParser(argparse.ArgumentParser):
    """A parser with the flags that all experiments have."""

    def __init__(
        self,
        description: str | None,
        home: Path,
        parts: Iterable[str] = (),
        *,
        seeds: Sequence[int] = (0, 1, 2, 3, 4),
        quick_seeds: Sequence[int] = (0, 1),
    ) -> None:
        super().__init__(description=(description or "").splitlines()[0], allow_abbrev=False)
        self._home, self._parts = home, tuple(parts)
        self._seeds, self._quick_seeds = tuple(seeds), tuple(quick_seeds)
        usual, quick = (",".join(map(str, each)) for each in (seeds, quick_seeds))
        self.add_argument(
            "--seeds",
            type=seed_list,
            metavar="LIST",
            help=f"seeds of the reported runs, such as 3,7,11 [{usual}; with --quick: {quick}]",
        )
        if self._parts:
            text = f"run only these parts, of {', '.join(self._parts)} [all]"
            self.add_argument("--only", nargs="+", metavar="PART", choices=self._parts, help=text)
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
        """Parse the command line, and set ``seeds`` and ``only`` if they are not given."""
        parsed = self.parse_args(words)
        if parsed.seeds is None:
            parsed.seeds = self._quick_seeds if parsed.quick else self._seeds
        if self._parts:
            # In the order of the parts, and a part that is named twice runs once.
            parsed.only = [part for part in self._parts if part in (parsed.only or self._parts)]
        return parsed

    def output_folder(self, parsed: argparse.Namespace, *, published: bool = True) -> Path:
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
    """Return the seeds of a comma-separated list, without repetitions, in the order given."""
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


@dataclass(frozen=True)
class Part:
    """A part of an experiment, with the tables and pictures that it shows."""

    # Checks the flags, and returns what measures the missing rows. That returns what is wrong with
    # the results, if anything.
    open: Callable[[argparse.Namespace], Callable[[], Sequence[str] | None]]
    tables: Sequence[TableMaker] = ()  # made from the folder of the results, and printed
    pictures: Mapping[str, Picture] = field(default_factory=dict)


def run_parts(arguments: argparse.Namespace, parts: Mapping[str, Part]) -> None:
    """Run the parts that ``--only`` names; exit with status 1 if a result is wrong."""
    started = time.monotonic()
    # The models are small: more threads would only wait for each other.
    torch.set_num_threads(1)
    # All input is checked before anything is computed and before any file is written.
    chosen = {name: parts[name].open(arguments) for name in arguments.only}
    make_folder(arguments.out)
    problems: list[str] = []
    for name, measure in chosen.items():
        print(f"\n--- {name}", flush=True)
        problems += measure() or []
        for make in parts[name].tables:
            print(f"\n{make(arguments.out)}", flush=True)
        for file, picture in parts[name].pictures.items():
            picture(arguments.out, arguments.out / f"{file}.png")
    print(f"\ntables and pictures are in {arguments.out}")
    print(f"total time: {time.monotonic() - started:.0f} s")
    if problems:
        sys.exit("\n".join(["error: the results differ:", *problems]))


class ResultTable:
    """A CSV file with one row per finished run, and perhaps a second one with points of curves.

    ``run`` are the columns that name a run. ``# task:`` above the header names what all rows share;
    ``resume`` keeps the rows of the same task. ``curve`` are the columns of a point in
    ``PATH_curves.csv``, and ``curve_of`` those that name its curve, by default those of the run.
    """

    def __init__(
        self,
        path: Path,
        run: Sequence[str],
        outcome: Sequence[str],
        task: str,
        *,
        resume: bool,
        curve: Sequence[str] = (),
        curve_of: Sequence[str] = (),
    ) -> None:
        self.path, self._task, self.run = path, task, tuple(run)
        self.curve_path = path.with_stem(f"{path.stem}_curves")
        self.header = (*run, *outcome, *PROVENANCE)
        self._curve_of = tuple(curve_of) or self.run
        self.curve_header = (*self._curve_of, *curve) if curve else ()
        self.rows: list[Texts] = []
        self._points: list[Texts] = []
        if resume:
            self.read()

    def read(self) -> None:
        """Read the files. A missing file is no error: its part has no rows yet."""
        self.rows = self._read(self.path, self.header)
        if self.curve_header:
            # A curve is saved before its row: an interruption can leave one without a row.
            finished = {_texts(row, self._curve_of) for row in self.rows}
            found = self._read(self.curve_path, self.curve_header)
            self._points = [row for row in found if _texts(row, self._curve_of) in finished]

    def missing(self, runs: Iterable[_Run]) -> list[_Run]:
        """Return the runs that have no row. A run is a dataclass or a tuple with its cells."""
        finished = {_texts(row, self.run) for row in self.rows}
        return [run for run in runs if tuple(map(str, cells(run))) not in finished]

    def add(self, run: Any, outcome: Any, points: Sequence[Any] = ()) -> None:
        """Append and save the row of a finished run, after the points of its curve."""
        made = (*cells(run), *cells(outcome), *provenance().values())
        row = dict(zip(self.header, map(str, made), strict=True))
        if self.curve_header and points:
            named = _texts(row, self._curve_of)
            new = [(*named, *map(str, cells(point))) for point in points]
            self._points += [dict(zip(self.curve_header, each, strict=True)) for each in new]
            self._write(self.curve_path, self.curve_header, self._points)
        self.rows.append(row)
        self._write(self.path, self.header, self.rows)

    def _write(self, path: Path, header: Sequence[str], rows: list[Texts]) -> None:
        # A process that is killed while it writes leaves the old file as it was.
        unfinished = path.with_suffix(".tmp")
        write_csv(unfinished, header, [list(row.values()) for row in rows], task=self._task)
        unfinished.replace(path)

    def _read(self, path: Path, header: Sequence[str]) -> list[Texts]:
        if not path.exists():
            return []
        found = read_notes(path).get("task", "unknown settings")
        if found != self._task:
            raise RecipeError(
                f"--resume cannot use {path}, whose rows are of: {found}; this run is: "
                f"{self._task}. Choose another folder with --out, or leave out --resume"
            )
        rows = read_csv(path)
        if rows and tuple(rows[0]) != tuple(header):
            raise RecipeError(
                f"--resume cannot use {path}, whose columns are {', '.join(rows[0])}; "
                f"expected {', '.join(header)}"
            )
        return rows


def _texts(row: Texts, columns: Sequence[str]) -> tuple[str, ...]:
    return tuple(row[name] for name in columns)


def fill(
    table: ResultTable, runs: Iterable[_Run], measure: Callable[[_Run], Any], processes: int = 1
) -> None:
    """Measure the runs that a table lacks, several at a time, and save each as it ends."""
    missing = table.missing(runs)
    for run, outcome in zip(missing, _measured(measure, missing, processes), strict=True):
        _add(table, run, outcome)


def fill_on_ranks(
    ranks: int, table: ResultTable, runs: Iterable[_Run], measure: Callable[[_Run], Any]
) -> None:
    """Do the same on ranks that are processes of this machine: all of them measure every run."""
    if missing := table.missing(runs):
        run_on_ranks(ranks, _fill_on_this_rank, table, missing, measure)
        # The ranks have copies of the table, and rank 0 has saved its own.
        table.read()


def _fill_on_this_rank(table: ResultTable, runs: list[Any], measure: Callable[[Any], Any]) -> None:
    for run in runs:
        outcome = measure(run)
        if dist.get_rank() == 0:
            _add(table, run, outcome)


def _add(table: ResultTable, run: Any, outcome: Any) -> None:
    of_run, points = outcome if table.curve_header else (outcome, ())
    table.add(run, of_run, points)
    # The parent's output is often a pipe, where lines would otherwise wait in the buffer.
    print(*list(table.rows[-1].values())[: -len(PROVENANCE)], flush=True)


def _measured(measure: Callable[[_Run], Any], runs: list[_Run], processes: int) -> Iterator[Any]:
    if min(processes, len(runs)) < 2:
        yield from map(measure, runs)
        return
    # Spawned processes read it when they import torch, so it must be set before the pool starts.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Fresh processes: PyTorch's threads do not survive a fork.
    pool = ProcessPoolExecutor(processes, get_context("spawn"), partial(torch.set_num_threads, 1))
    try:
        yield from pool.map(measure, runs)
    finally:
        # After an error or Ctrl-C, do not start the queued runs.
        pool.shutdown(cancel_futures=True)
