"""The one error that a recipe shows to its user, and how: in one line."""

import difflib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torchcomp.errors import SpecError


class RecipeError(Exception):
    """Bad input: the message says what was wrong, what was expected, and why."""


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """End the program with the message alone of what was wrong with its input."""
    try:
        yield
    except (RecipeError, SpecError) as error:
        sys.exit(f"error: {error}")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that looks most like ``name``."""
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]
