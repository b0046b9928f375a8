"""The outcomes of all finished runs, in files that ``--resume`` reads: one for every part."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from recipes.experiments import ResultTable
from recipes.qsr.settings import Setting
from recipes.qsr.training import Outcome, Point

TASK = "schedules of averages; the columns have all settings"


@dataclass(frozen=True)
class TrainingRun:
    """All that the outcome of a run depends on."""

    setting: Setting
    point: Point
    seed: int
    part: str


# Column names, and the types that convert their text.
_SETTING: dict[str, Any] = {field.name: field.type for field in fields(Setting)}
_POINT: dict[str, Any] = {field.name: field.type for field in fields(Point)}
_RESULT: dict[str, Any] = {
    field.name: field.type for field in fields(Outcome) if field.name != "curve"
}
_RUN_COLUMNS = (*_SETTING, *_POINT, "seed", "part", *_RESULT)
_CURVE_COLUMNS = (*_SETTING, "method", "seed", "step", "accuracy")


@dataclass(frozen=True)
class Tables:
    """The files of one part: its runs, and the accuracy during some of them."""

    runs: ResultTable
    curves: ResultTable


def open_tables(folder: Path, part: str, *, resume: bool) -> Tables:
    """Open a part's files, with their finished runs if ``resume`` is set.

    Raises:
        RecipeError: if ``resume`` is set and a file has other columns.
    """
    of_runs, of_curves = paths(folder, part)
    return Tables(
        ResultTable(of_runs, _RUN_COLUMNS, TASK, resume=resume),
        ResultTable(of_curves, _CURVE_COLUMNS, TASK, resume=resume, curves=True),
    )


def paths(folder: Path, part: str) -> tuple[Path, Path]:
    """Return the files of a part: of its runs, and of their curves."""
    return folder / f"{part}.csv", folder / f"{part}_curves.csv"


def read_outcomes(rows: Iterable[dict[str, str]]) -> dict[TrainingRun, Outcome]:
    """Return the outcomes of a table's rows."""
    return {
        TrainingRun(
            Setting(**_typed(row, _SETTING)),
            Point(**_typed(row, _POINT)),
            int(row["seed"]),
            row["part"],
        ): Outcome(**_typed(row, _RESULT))
        for row in rows
    }


@dataclass(frozen=True)
class Curve:
    """The accuracy of the averaged model at some steps of a run."""

    setting: Setting
    method: str
    seed: int


def read_curves(rows: Iterable[dict[str, str]]) -> dict[Curve, dict[int, float]]:
    """Return the curves of a table's rows: accuracy in per cent by step."""
    curves: dict[Curve, dict[int, float]] = {}
    for row in rows:
        curve = Curve(Setting(**_typed(row, _SETTING)), row["method"], int(row["seed"]))
        curves.setdefault(curve, {})[int(row["step"])] = float(row["accuracy"])
    return curves


def _typed(row: dict[str, str], types: dict[str, Any]) -> dict[str, Any]:
    return {name: convert(row[name]) for name, convert in types.items()}


class Ledger:
    """The outcomes of all finished runs: the same on all ranks, and saved by one of them.

    Args:
        tables: the files.
        saves: whether this rank writes to them.
    """

    def __init__(self, tables: Tables, *, saves: bool) -> None:
        self._tables, self._saves = tables, saves
        self._outcomes = read_outcomes(tables.runs.rows)

    def outcomes(
        self,
        setting: Setting,
        point: Point,
        seeds: Sequence[int],
        part: str,
        train: Callable[[Sequence[int]], list[Outcome]],
    ) -> dict[int, Outcome]:
        """Return the outcomes by seed; call ``train`` with the seeds that have none yet."""
        runs = {seed: TrainingRun(setting, point, seed, part) for seed in seeds}
        missing = [seed for seed, run in runs.items() if run not in self._outcomes]
        if missing:
            found = dict(zip(missing, train(missing), strict=True))
            self._outcomes.update((runs[seed], outcome) for seed, outcome in found.items())
            if self._saves:
                # After every point, so that an interruption loses one at most.
                self._save([(runs[seed], outcome) for seed, outcome in found.items()])
        return {seed: self._outcomes[run] for seed, run in runs.items()}

    def _save(self, finished: list[tuple[TrainingRun, Outcome]]) -> None:
        points = [
            (*astuple(run.setting), run.point.method, run.seed, step, accuracy)
            for run, outcome in finished
            for step, accuracy in outcome.curve
        ]
        if points:
            self._tables.curves.add(*points)
        self._tables.runs.add(
            *(
                (
                    *(*astuple(run.setting), *astuple(run.point), run.seed, run.part),
                    *(outcome.accuracy, outcome.loss, outcome.syncs, outcome.nbytes),
                )
                for run, outcome in finished
            )
        )
