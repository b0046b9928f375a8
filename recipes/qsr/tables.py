"""The tables of the pages, computed from the files of the results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from recipes.errors import RecipeError
from recipes.qsr.settings import (
    ADAMW_MLP,
    ADAMW_VIT,
    GRID,
    MAIN_METHODS,
    METHODS,
    PARALLEL,
    PARTS,
    SGD_MLP,
    Point,
    Setting,
)
from recipes.rows import (
    Row,
    Spread,
    build,
    by_seed,
    grouped,
    over_seeds,
    paired,
    read_rows,
    spread,
    where,
)
from recipes.tables import TableMaker, table

_NONE = "–"
# Marks a tuned value that is an end of its grid.
_END = "†"
_LENGTHS = {f"{epochs} epochs": Setting(epochs=epochs) for epochs in (30, 120, 360)}


@dataclass(frozen=True)
class Entry:
    """The runs of a point in a setting, one of each seed."""

    point: Point
    rows: list[Row]

    @property
    def accuracy(self) -> Spread:
        """Accuracy over the seeds, in per cent."""
        return over_seeds(self.rows, "accuracy")

    @property
    def syncs(self) -> int:
        """Number of averages, which does not depend on the seed."""
        return max(row["syncs"] for row in self.rows)

    @property
    def by_seed(self) -> dict[int, float]:
        return by_seed(self.rows, "accuracy")

    def ahead_of(self, other: "Entry") -> Spread:
        return paired(self.by_seed, other.by_seed)


class Results:
    """Everything that the files of a folder hold."""

    def __init__(self, folder: Path) -> None:
        files = [file for part in PARTS if (file := folder / f"{part}.csv").exists()]
        rows = [row for file in files for row in read_rows(file)]
        self._by_setting = grouped(rows, lambda row: build(Setting, row))

    def settings(self) -> list[Setting]:
        """Return the settings that have reported runs."""
        return [each for each, rows in self._by_setting.items() if where(rows, part="test")]

    def entries(self, setting: Setting, part: str, method: str) -> list[Entry]:
        """Return a method's points on "validation" or "test"."""
        rows = where(self._by_setting.get(setting, []), part=part, method=method)
        groups = grouped(rows, lambda row: build(Point, row))
        return [Entry(point, own) for point, own in groups.items()]

    def reported(self, setting: Setting, method: str) -> Entry | None:
        """Return a method's reported runs, or None without any."""
        found = self.entries(setting, "test", method)
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


def summary(folder: Path) -> str:
    results = Results(folder)
    return "\n\n".join(f"{each}\n{_methods(results, each)}" for each in results.settings())


def methods(folder: Path, setting: Setting) -> str:
    return _methods(Results(folder), setting)


def _methods(results: Results, setting: Setting) -> str:
    parallel, qsr = (results.reported(setting, name) for name in (PARALLEL, "QSR"))
    columns = {
        "": lambda entry: entry.point.method,
        "schedule": lambda entry: f"`{entry.point.schedule}`",
        "accuracy, %": lambda entry: entry.accuracy.with_deviation(),
        "it − parallel": lambda entry: _difference(entry, parallel),
        "QSR − it": lambda entry: _difference(qsr, entry),
        "averages": lambda entry: _share(entry, parallel),
        "MB": lambda entry: f"{max(row['nbytes'] for row in entry.rows) / 1e6:.1f}",
    }
    return table(columns, [entry for each in METHODS if (entry := results.reported(setting, each))])


def settings(folder: Path, chosen: Mapping[str, Setting]) -> str:
    """Return the main methods of several settings, one setting per row."""
    results = Results(folder)
    found = [(name, each) for name, own in chosen.items() if (each := results.main(own))]
    columns: dict[str, Callable[..., object]] = {"": lambda each: each[0]}
    for index, method in enumerate(MAIN_METHODS):
        columns[f"{method}, %"] = lambda each, i=index: each[1][i].accuracy.with_deviation()
    columns |= {
        "QSR − parallel": lambda each: _difference(each[1][2], each[1][0]),
        "QSR − constant H": lambda each: _difference(each[1][2], each[1][1]),
        "averages: constant H": lambda each: _share(each[1][1], each[1][0]),
        "QSR": lambda each: _share(each[1][2], each[1][0]),
    }
    return table(columns, found)


def growth(folder: Path) -> str:
    """Return how QSR's lead changes from the shortest run to the longest, paired by seed."""
    results, names = Results(folder), [*_LENGTHS]

    def lead(index: int, name: str) -> dict[int, float]:
        entries = results.main(_LENGTHS[name])
        assert entries is not None
        other = entries[index].by_seed
        return {seed: own - other[seed] for seed, own in entries[2].by_seed.items()}

    columns = {
        "QSR ahead of": lambda index: MAIN_METHODS[index],
        names[0]: lambda index: spread(lead(index, names[0]).values()).with_error(),
        names[-1]: lambda index: spread(lead(index, names[-1]).values()).with_error(),
        "change": lambda index: paired(lead(index, names[-1]), lead(index, names[0])).with_error(),
    }
    return table(columns, range(2))


def verdicts(folder: Path) -> str:
    """Return in how many settings QSR differs from the others by two standard errors or more."""
    results = Results(folder)
    found = [entries for each in results.settings() if (entries := results.main(each))]

    def count(index: int, side: int) -> str:
        sides = [_side(entries[2].ahead_of(entries[index])) for entries in found]
        return f"{sides.count(side)} of {len(sides)}"

    columns = {
        "QSR against": lambda index: MAIN_METHODS[index],
        "ahead": lambda index: count(index, 1),
        "no difference": lambda index: count(index, 0),
        "behind": lambda index: count(index, -1),
    }
    return table(columns, range(2))


def _side(difference: Spread) -> int:
    """Return 1 or -1 for a difference of at least two standard errors, and otherwise 0."""
    mean, least = difference.mean, 2 * difference.error
    return (mean >= least) - (mean <= -least)


def tuned(folder: Path) -> str:
    """Return what tuning has chosen in every setting; a mark shows an end of the grid."""
    results = Results(folder)
    found = [(each, entries) for each in results.settings() if (entries := results.main(each))]
    columns: dict[str, Callable[..., object]] = {
        "model": lambda each: each[0].model,
        "optimizer": lambda each: each[0].optimizer,
        "decay": lambda each: each[0].decay,
        "K": lambda each: each[0].ranks,
        "epochs": lambda each: each[0].epochs,
        "label noise": lambda each: f"{each[0].label_noise:g}",
        "peak lr": lambda each: _marked(each[1][0].point.lr, GRID.lrs[each[0].optimizer]),
        "weight decays of the three": lambda each: ", ".join(
            _marked(entry.point.weight_decay, GRID.weight_decays[each[0].optimizer])
            for entry in each[1]
        ),
        "constant H": lambda each: _marked(
            f"`{each[1][1].point.schedule}`", [f"`every({h})`" for h in GRID.periods]
        ),
        "QSR": lambda each: f"`{each[1][2].point.schedule}`",
    }
    return table(columns, found)


def _marked(chosen: object, tried: Sequence[object]) -> str:
    text = chosen if isinstance(chosen, str) else f"{chosen:g}"
    return f"{text}{_END}" if chosen in (tried[0], tried[-1]) else text


def _difference(ours: Entry | None, theirs: Entry | None) -> str:
    if ours is None or theirs is None or ours.point == theirs.point:
        return _NONE
    return ours.ahead_of(theirs).with_error()


def _share(entry: Entry, parallel: Entry | None) -> str:
    # Parallel training averages in every step.
    share = f" ({entry.syncs / parallel.syncs:.1%})" if parallel else ""
    return f"{entry.syncs:,}{share}"


_MAIN = {"SGD, MLP": SGD_MLP, "AdamW, MLP": ADAMW_MLP, "AdamW, ViT": ADAMW_VIT}
_DECAYS = {each: Setting(decay=each) for each in ("cosine", "linear", "step-cosine", "step")}
_WORKERS = {f"{ranks} workers": Setting(ranks=ranks) for ranks in (2, 4, 8)}
_LABELS = {"a fifth of the labels random": SGD_MLP, "all right": replace(SGD_MLP, label_noise=0.0)}
TABLES: dict[str, TableMaker] = {
    "sgd_mlp": partial(methods, setting=SGD_MLP),
    "adamw_mlp": partial(methods, setting=ADAMW_MLP),
    "adamw_vit": partial(methods, setting=ADAMW_VIT),
    "main": partial(settings, chosen=_MAIN),
    "lengths": partial(settings, chosen=_LENGTHS),
    "growth": growth,
    "decays": partial(settings, chosen=_DECAYS),
    "workers": partial(settings, chosen=_WORKERS),
    "clean_labels": partial(settings, chosen=_LABELS),
    "verdicts": verdicts,
    "tuned": tuned,
}
"""By the name that a page uses."""
