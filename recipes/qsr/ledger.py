"""The outcomes of all finished runs, in a file that ``--resume`` reads."""

from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from recipes.experiments import ResultTable
from recipes.qsr.local_training import Length, Outcome


@dataclass(frozen=True)
class TrainingRun:
    """All settings that the outcome of a run depends on."""

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


# Column names and the types that convert their text.
_SETTINGS = {field.name: field.type for field in fields(TrainingRun)}
_RESULTS = {field.name: field.type for field in fields(Outcome)}


def open_table(
    folder: Path, dataset: str, label_noise: float, ranks: int, length: Length, *, resume: bool
) -> ResultTable:
    """Open ``runs.csv``, with its finished runs if ``resume`` is set.

    Raises:
        RecipeError: if ``resume`` is set and the file was made with other settings.
    """
    epochs = f"{length.epochs} epochs of which {length.warmup_epochs} warm-up"
    task = f"{dataset}, label noise {label_noise:g}, {ranks} ranks, batch {length.batch}, {epochs}"
    return ResultTable(folder / "runs.csv", (*_SETTINGS, *_RESULTS), task, resume=resume)


def read_outcomes(table: ResultTable) -> dict[TrainingRun, Outcome]:
    """Return the outcomes of the table's runs."""
    return {
        TrainingRun(*_typed(row, _SETTINGS)): Outcome(*_typed(row, _RESULTS)) for row in table.rows
    }


def _typed(row: dict[str, str], types: dict[str, Callable[[str], Any]]) -> list[Any]:
    return [convert(row[name]) for name, convert in types.items()]


class Ledger:
    """The outcomes of all finished runs: the same on all ranks, and saved by one of them.

    Args:
        table: the file.
        saves: whether this rank writes to it.
    """

    def __init__(self, table: ResultTable, *, saves: bool) -> None:
        self._table, self._saves = table, saves
        self._outcomes = read_outcomes(table)

    def outcome(self, run: TrainingRun, train: Callable[[], Outcome]) -> Outcome:
        """Return the outcome of ``run``; call ``train`` if it is not there yet."""
        if run not in self._outcomes:
            self._outcomes[run] = train()
            if self._saves:
                # After every run, so that an interruption loses one run at most.
                self._table.add((*astuple(run), *astuple(self._outcomes[run])))
        return self._outcomes[run]
