"""Checks of option values. Each raises SpecError with the names of the option and of its owner.

NumPy's numbers are numbers. Booleans are not.
"""

import math
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Protocol, TypeGuard

from torchcomp.specs.errors import SpecError


def is_whole(value: object) -> TypeGuard[int]:
    """Whether `value` has an integer type: 3 has one, but 3.0 and True do not."""
    # bool is a subclass of int.
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is a finite real number."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond the range of floats
        return False


def check_count(
    name: str, value: object, least: int = 1, most: int | None = None, *, owner: str = ""
) -> None:
    """Require an integer of at least `least` and, if `most` is not None, of at most `most`."""
    bounds = f"of at least {least}" if most is None else f"from {least} to {most:,}"
    valid = is_whole(value) and least <= value and (most is None or value <= most)
    _require(valid, name, f"an integer {bounds}", value, owner)


class _Check(Protocol):
    def __call__(self, name: str, value: object, *, owner: str = "") -> None: ...


def _number(expected: str, within: Callable[[float], bool]) -> _Check:
    def check(name: str, value: object, *, owner: str = "") -> None:
        _require(is_number(value) and within(value), name, expected, value, owner)

    return check


check_positive = _number("a finite number above 0", lambda x: x > 0)
check_at_least_0 = _number("a finite number of at least 0", lambda x: x >= 0)
check_fraction = _number("a number above 0 and at most 1", lambda x: 0 < x <= 1)
check_share = _number("a number from 0 to 1", lambda x: 0 <= x <= 1)
# Below 1, so that the geometric sum of the momentum stays finite.
check_momentum = _number("a number from 0 to below 1", lambda x: 0 <= x < 1)


def check_flag(name: str, value: object, *, owner: str = "") -> None:
    """Require True or False."""
    _require(isinstance(value, bool), name, "True or False", value, owner)


def check_choice(name: str, value: object, choices: Iterable[str], *, owner: str = "") -> None:
    """Require a string that is one of `choices`."""
    known = tuple(choices)  # read twice below, and `choices` can be an iterator
    listed = ", ".join(f'"{choice}"' for choice in known)
    # The type first: comparing an array with a string does not give a bool.
    valid = isinstance(value, str) and value in known
    _require(valid, name, f"one of {listed}", value, owner)


def shown(value: object) -> str:
    """Return the `repr` of a value for an error, or its type if it has none."""
    try:
        return repr(value)
    # Deep nesting raises RecursionError, and an integer with too many digits ValueError.
    except Exception:
        return f"a value of type {type(value).__name__}"


def _require(valid: bool, name: str, expected: str, value: object, owner: str) -> None:
    if not valid:
        option = f"{owner}: {name}" if owner else name
        raise SpecError(f"{option} must be {expected}, not {shown(value)}", name)
