"""The one error that a recipe shows to its user."""

import difflib
from collections.abc import Iterable


class RecipeError(Exception):
    """Bad input: the message says what was wrong, what was expected, and why."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that looks most like ``name``."""
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]
