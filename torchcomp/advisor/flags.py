"""Flags: readers of numbers for command lines, with errors that say what was expected."""

import argparse
import math
from collections.abc import Callable

from torchcomp.specs.checks import is_number


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a reader of integers with bounds. They can be written as 25.6e6."""
    bounds = f"of at least {least}" if most is None else f"from {least} to {most:,}"

    def read(text: str) -> int:
        number = _float(text)
        if not number.is_integer() or number < least or (most is not None and number > most):
            problem = f"expected an integer {bounds}, such as 8 or 25.6e6, not {text}"
            raise argparse.ArgumentTypeError(problem)
        return int(number)

    return read


def number(bound: str) -> Callable[[str], float]:
    """Return a reader of finite numbers, "above 0" or "of at least 0"."""

    def read(text: str) -> float:
        value = _float(text)
        if not is_number(value) or value < 0 or (value == 0 and bound == "above 0"):
            raise argparse.ArgumentTypeError(f"expected a finite number {bound}, not {text}")
        return value

    return read


def _float(text: str) -> float:
    # nan and inf fail is_integer() and is_number().
    try:
        return float(text)
    except ValueError:
        return math.nan
