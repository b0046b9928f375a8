"""Rows of result tables with typed cells: selected, grouped, and summarised over the seeds.

A "±" means the same on all pages: after a mean, the sample standard deviation over the seeds; after
a difference, its standard error.
"""

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from recipes.result_files import read_csv

Row = dict[str, Any]
"""The cells of a row by column: whole numbers, floats, True or False, or text."""
Value = str | Callable[[Row], Any]
"""A column, or a function of a row."""
_MORE_DIGITS = 2
_Class = TypeVar("_Class")


@dataclass(frozen=True)
class Spread:
    mean: float  # their mean
    deviation: float  # their sample standard deviation; NaN for a single value
    count: int  # how many there are

    @property
    def error(self) -> float:
        """The standard error of the mean; NaN for a single value."""
        return self.deviation / math.sqrt(self.count)

    def with_deviation(self, digits: int = 2, sign: str = "") -> str:
        """Return mean and deviation as text: ``"89.14 ± 1.24"``; a single value stands alone."""
        return _plus_minus(self.mean, self.deviation, digits, sign)

    def with_error(self, digits: int = 2) -> str:
        """Return a difference and its standard error as text, with a sign: ``"+1.17 ± 0.52"``."""
        return _plus_minus(self.mean, self.error, digits, "+")


def spread(values: Iterable[float]) -> Spread:
    listed = list(values)
    deviation = statistics.stdev(listed) if len(listed) > 1 else math.nan
    return Spread(statistics.fmean(listed), deviation, len(listed))


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Spread:
    """Return the spread of the differences ``ours - theirs``, seed by seed."""
    seeds = [seed for seed in ours if seed in theirs]
    if not seeds:
        raise ValueError(f"no seed in common: {sorted(ours)} and {sorted(theirs)}")
    return spread(ours[seed] - theirs[seed] for seed in seeds)


def _plus_minus(mean: float, spread: float, digits: int, sign: str) -> str:
    digits = _enough(spread, digits)
    # Adding 0 turns -0.0 into 0.0.
    text = f"{round(mean, digits) + 0.0:{sign}.{digits}f}"
    return text if math.isnan(spread) else f"{text} ± {spread:.{digits}f}"


def _enough(spread: float, digits: int) -> int:
    """Return up to two digits more, if a spread other than 0 would otherwise print as 0."""
    wider = range(digits, digits + _MORE_DIGITS + 1)
    return next((each for each in wider if round(spread, each)), digits)


def read_rows(path: Path) -> list[Row]:
    return typed(read_csv(path))


def typed(rows: Iterable[Mapping[str, str]]) -> list[Row]:
    """Return rows with the values that their texts describe."""
    return [{name: _value(text) for name, text in row.items()} for row in rows]


def _value(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def where(rows: Iterable[Row], **wanted: object) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def distinct(rows: Iterable[Row], value: Value) -> list[Any]:
    """Return the values that the rows have, each once, in their order."""
    return list(dict.fromkeys(value_of(row, value) for row in rows))


def grouped(rows: Iterable[Row], *values: Value) -> dict[Any, list[Row]]:
    """Return the rows by one value, or by a tuple of several, in their order."""
    found: dict[Hashable, list[Row]] = {}
    for row in rows:
        key = tuple(value_of(row, value) for value in values)
        found.setdefault(key if len(values) > 1 else key[0], []).append(row)
    return found


def by_seed(rows: Iterable[Row], value: Value) -> dict[int, Any]:
    return {row["seed"]: value_of(row, value) for row in rows}


def over_seeds(rows: Iterable[Row], value: Value) -> Spread:
    return spread(value_of(row, value) for row in rows)


def value_of(row: Row, value: Value) -> Any:
    return row[value] if isinstance(value, str) else value(row)


def best(rows: Iterable[Row], choice: Value, *merits: Value) -> Any:
    """Return the choice whose rows have the highest mean merit; later merits decide ties."""
    means = {
        chosen: [fmean(_number(value_of(row, merit)) for row in group) for merit in merits]
        for chosen, group in grouped(rows, choice).items()
    }
    return max(means, key=means.__getitem__)


def _number(value: float) -> float:
    return value if value == value else 0.0


def columns(*classes: Any) -> tuple[str, ...]:
    """Return the column names of dataclasses; a field that is a dataclass stands for its own."""
    names: list[str] = []
    for cls in classes:
        for field in fields(cls):
            names += columns(field.type) if is_dataclass(field.type) else (field.name,)
    return tuple(names)


def cells(value: Any) -> tuple[Any, ...]:
    """Return the cells of a dataclass or a sequence, with those of the dataclasses inside it."""
    if is_dataclass(value):
        return cells([getattr(value, field.name) for field in fields(value)])
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(cell for each in value for cell in cells(each))
    return (value,)


def build(cls: type[_Class], row: Row) -> _Class:
    """Return the dataclass whose cells a row has; see :func:`columns`."""
    values = {
        field.name: build(field.type, row)
        if is_dataclass(field.type) and isinstance(field.type, type)
        else row[field.name]
        for field in fields(cls)  # type: ignore[arg-type]
    }
    return cls(**values)
