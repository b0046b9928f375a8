"""Every finished run, written down at once, so that ``--resume`` loses no more than one."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from recipes.errors import RecipeError
from recipes.qsr.local_training import Outcome
from recipes.result_files import read_csv, write_csv


@dataclass(frozen=True)
class Run:
    """All that a run depends on."""

    dataset: str
    label_noise: float
    ranks: int
    batch: int
    epochs: int
    warmup_epochs: int
    schedule: str
    lr: float
    seed: int
    part: str


_KEY = {field.name: field.type for field in fields(Run)}
_VALUE = {field.name: field.type for field in fields(Outcome)}


class Ledger:
    """What every run ended with; alike on all ranks, and kept in a file by one of them."""

    def __init__(self, path: Path | None, outcomes: dict[Run, Outcome]) -> None:
        self._path = path
        self._outcomes = dict(outcomes)

    def outcome(self, run: Run, train: Callable[[], Outcome]) -> Outcome:
        """Return what ``run`` ended with, and ``train`` if that is not known."""
        if run not in self._outcomes:
            self._outcomes[run] = train()
            self._write()
        return self._outcomes[run]

    def _write(self) -> None:
        if self._path is None:
            return
        rows = [
            [*asdict(run).values(), *asdict(outcome).values()]
            for run, outcome in self._outcomes.items()
        ]
        unfinished = self._path.with_suffix(".tmp")
        write_csv(unfinished, [*_KEY, *_VALUE], rows)
        unfinished.replace(self._path)


def read_outcomes(path: Path) -> dict[Run, Outcome]:
    """Read what :class:`Ledger` wrote.

    Raises:
        RecipeError: if there is no such file, or it is of another kind.
    """
    if not path.exists():
        raise RecipeError(f"--resume finds no {path}: without it, the experiment starts afresh")
    rows = read_csv(path)
    if not rows or list(rows[0]) != [*_KEY, *_VALUE]:
        raise RecipeError(
            f"--resume cannot use {path}, whose columns are not {', '.join([*_KEY, *_VALUE])}"
        )
    return {Run(*_typed(row, _KEY)): Outcome(*_typed(row, _VALUE)) for row in rows}


def _typed(row: dict[str, str], kinds: dict[str, Callable[[str], Any]]) -> list[Any]:
    return [kind(row[name]) for name, kind in kinds.items()]
