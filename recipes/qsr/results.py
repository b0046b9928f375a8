"""The results in the files of a folder: every method's reported runs, and what was tried."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from recipes.errors import RecipeError
from recipes.qsr.ledger import Curve, TrainingRun, paths, read_curves, read_outcomes
from recipes.qsr.settings import MAIN_METHODS, OWN, PARTS, Setting
from recipes.qsr.training import Outcome, Point
from recipes.result_files import read_csv
from recipes.spread import Spread, paired, spread


@dataclass(frozen=True)
class Entry:
    """A point in a setting, with its outcome by seed."""

    setting: Setting
    point: Point
    outcomes: dict[int, Outcome]

    @property
    def accuracy(self) -> Spread:
        """Accuracy over the seeds, in per cent."""
        return spread(self.by_seed.values())

    @property
    def syncs(self) -> int:
        """Number of synchronisations, which does not depend on the seed."""
        return max(outcome.syncs for outcome in self.outcomes.values())

    @property
    def nbytes(self) -> int:
        """Bytes that one rank sent in a run."""
        return max(outcome.nbytes for outcome in self.outcomes.values())

    @property
    def by_seed(self) -> dict[int, float]:
        """Accuracy in per cent by seed."""
        return {seed: outcome.accuracy for seed, outcome in self.outcomes.items()}

    def ahead_of(self, other: "Entry") -> Spread:
        """Return the difference in accuracy, paired by seed."""
        return paired(self.by_seed, other.by_seed)


@dataclass(frozen=True)
class Results:
    """Everything that the files of a folder hold.

    Attributes:
        entries: every point on "validation" or "test", in the order of the runs.
        curves: accuracy by step, of some of the reported runs.
    """

    entries: dict[tuple[Setting, Point, str], Entry]
    curves: dict[Curve, dict[int, float]]

    def settings(self) -> list[Setting]:
        """Return the settings that have reported runs."""
        return list(dict.fromkeys(setting for setting, _, part in self.entries if part == "test"))

    def reported(self, setting: Setting, method: str) -> Entry | None:
        """Return a method's reported runs, or None without any.

        Raises:
            RecipeError: if there are two points: the file has runs of two grids.
        """
        found = [each for each in self._entries(setting, "test") if each.point.method == method]
        if len(found) > 1:
            raise RecipeError(
                f"{method} has test runs of {len(found)} points in {setting}: expected one. "
                "Measure the part again without --resume"
            )
        return found[0] if found else None

    def main(self, setting: Setting) -> tuple[Entry, Entry, Entry] | None:
        """Return parallel training, constant H and QSR, or None unless all three have runs."""
        parallel, constant, qsr = (self.reported(setting, method) for method in MAIN_METHODS)
        return (parallel, constant, qsr) if parallel and constant and qsr else None

    def tried(self, setting: Setting, method: str) -> list[Entry]:
        """Return the points of a method that were tried on the validation part."""
        entries = self._entries(setting, "validation")
        return [entry for entry in entries if entry.point.method == method]

    def _entries(self, setting: Setting, part: str) -> Iterator[Entry]:
        for (its_setting, _, its_part), entry in self.entries.items():
            if (its_setting, its_part) == (setting, part):
                yield entry


ALL_PARTS = (*PARTS, OWN)
"""Everything that can have a file."""


def read_results(folder: Path, parts: Iterable[str] = ALL_PARTS) -> Results:
    """Read the files of the parts that a folder has.

    Raises:
        RecipeError: if a file lacks a column or has a damaged row.
    """
    runs: dict[TrainingRun, Outcome] = {}
    curves: dict[Curve, dict[int, float]] = {}
    for part in parts:
        of_runs, of_curves = paths(folder, part)
        try:
            runs |= read_outcomes(read_csv(of_runs)) if of_runs.exists() else {}
            curves |= read_curves(read_csv(of_curves)) if of_curves.exists() else {}
        except KeyError as missing:
            raise RecipeError(
                f"the files of {part} in {folder} have no column {missing}: another version wrote "
                "them. Delete them, or choose another folder with --out"
            ) from None
        except (TypeError, ValueError) as error:
            raise RecipeError(
                f"the files of {part} in {folder} have a damaged row ({error}): delete it, or "
                "choose another folder with --out"
            ) from None
    entries: dict[tuple[Setting, Point, str], Entry] = {}
    for run, outcome in runs.items():
        key = (run.setting, run.point, run.part)
        entry = entries.setdefault(key, Entry(run.setting, run.point, {}))
        entry.outcomes[run.seed] = outcome
    return Results(entries, curves)
