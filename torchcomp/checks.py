"""What is asked of an option's value, with one wording of errors for the whole package.

Each check takes the option's name, its value and, where the option belongs to something that has a
name of its own, that name as `owner`; it raises SpecError, naming the option and its value. NumPy's
numbers are numbers here, and booleans are not.
"""

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import TypeGuard

from torchcomp.errors import SpecError


def is_whole(value: object) -> TypeGuard[int]:
    """Whether `value` is a whole number by its type: 3 is, 3.0 and True are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is a finite real number."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond the range of floats
        return False


def check_count(
    name: str, value: object, least: int = 1, most: int | None = None, *, owner: str = ""
) -> None:
    """Require a whole number of at least `least`, and of at most `most`."""
    bounds = f"of at least {least}" if most is None else f"from {least} to {most:,}"
    holds = is_whole(value) and least <= value and (most is None or value <= most)
    _require(holds, name, f"a whole number {bounds}", value, owner)


def check_positive(name: str, value: object, *, owner: str = "") -> None:
    """Require a finite number above zero."""
    holds = is_number(value) and value > 0
    _require(holds, name, "a finite number above 0", value, owner)


def check_at_least_0(name: str, value: object, *, owner: str = "") -> None:
    """Require a finite number that is not negative."""
    holds = is_number(value) and value >= 0
    _require(holds, name, "a finite number of at least 0", value, owner)


def check_fraction(name: str, value: object, *, owner: str = "") -> None:
    """Require a number above 0 and at most 1."""
    holds = is_number(value) and 0 < value <= 1
    _require(holds, name, "a number above 0 and at most 1", value, owner)


def check_share(name: str, value: object, *, owner: str = "") -> None:
    """Require a number from 0 to 1."""
    holds = is_number(value) and 0 <= value <= 1
    _require(holds, name, "a number from 0 to 1", value, owner)


def check_momentum(name: str, value: object, *, owner: str = "") -> None:
    """Require a number from 0 to below 1, with which a geometric sum stays finite."""
    holds = is_number(value) and 0 <= value < 1
    _require(holds, name, "a number from 0 to below 1", value, owner)


def check_flag(name: str, value: object, *, owner: str = "") -> None:
    """Require True or False."""
    _require(isinstance(value, bool), name, "True or False", value, owner)


def check_choice(name: str, value: object, choices: Iterable[str], *, owner: str = "") -> None:
    """Require a text that is one of `choices`."""
    known = tuple(choices)
    listed = ", ".join(f'"{choice}"' for choice in known)
    _require(isinstance(value, str) and value in known, name, f"one of {listed}", value, owner)


def _require(holds: bool, name: str, expected: str, value: object, owner: str) -> None:
    if not holds:
        place = f"{owner}: {name}" if owner else name
        raise SpecError(f"{place} must be {expected}, not {value!r}", name)
