"""Units: numbers as people read and write them, and text in 80 columns.

Measured numbers have two digits, others three.
"""

import argparse
import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from torchcomp.exchange.traffic import three_digits
from torchcomp.specs.checks import is_number

_Units = Sequence[tuple[str, float]]
_TIMES = (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
_SIZES = (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1.0))
_RATES = (("Gbit/s", 1e9), ("Mbit/s", 1e6))  # decimal, as the sizes


def two_digits(number: float) -> str:
    """Return a measured number: "4.2", "31", "1,234"."""
    return f"{number:.1f}" if number < 9.95 else f"{number:,.0f}"


def duration(seconds: float, text: Callable[[float], str] = two_digits) -> str:
    """Return a duration: "31 us", "4.2 ms", "1.8 s", "1,234 h"."""
    return _shown(seconds, _TIMES, text)


def rate(bytes_per_second: float) -> str:
    """Return a bandwidth in bits: "9.4 Mbit/s", "1.2 Gbit/s"."""
    return _shown(8 * bytes_per_second, _RATES, two_digits)


def size(nbytes: float, text: Callable[[float], str] = two_digits) -> str:
    """Return a size: "12 bytes", "4.1 kB", "17 MB"."""
    return f"{nbytes:.0f} bytes" if nbytes < 1e3 else _shown(nbytes, _SIZES, text)


def exact_size(nbytes: int) -> str:
    """Return a size with its exact number for comparisons: "9.07 MB (9,070,936 bytes)"."""
    exact = f"{nbytes:,} bytes"
    return exact if nbytes < 1e3 else f"{size(nbytes, three_digits)} ({exact})"


def _shown(value: float, units: _Units, text: Callable[[float], str]) -> str:
    unit, factor = next((each for each in units if value >= each[1]), units[-1])
    return f"{text(value / factor)} {unit}"


def wrapped(head: str, text: str) -> str:
    """Return `head` and then `text`, in lines of at most 80 columns that begin below `text`."""
    indent = " " * (len(head) or 2)
    # At spaces only: specs in the text are copied from the terminal.
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(text, 80, initial_indent=head, subsequent_indent=indent, **options)


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
