"""Errors of the user's input. Programs end with their message in place of a traceback."""

import difflib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torchcomp

# torchcomp's errors that a change of the flags can fix.
TORCHCOMP_ERRORS = (
    torchcomp.ScheduleError,
    torchcomp.RankMismatchError,
    torchcomp.CheckpointError,
    torchcomp.NonFiniteError,
    torchcomp.UnsupportedModelError,
)


class RecipeError(Exception):
    """Invalid input. The message says what was wrong, what was expected, and what to do."""


@contextmanager
def exit_on_user_error(*more: type[Exception]) -> Iterator[None]:
    """Exit with ``error: <message>`` if the block raises an error of the user's input."""
    try:
        yield
    except (RecipeError, torchcomp.SpecError, *more) as error:
        if "RANK" not in os.environ:
            sys.exit(f"error: {error}")
        # Under torchrun every rank prints its message: a file can be missing on one rank only, and
        # torchrun stops the others at once. One write, so that two ranks do not share a line.
        sys.stderr.write(f"error (rank {os.environ['RANK']}): {error}\n")
        sys.exit(1)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most similar to ``name``."""
    # Without a cutoff, so that there is always a suggestion.
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]
