"""Select the cases that only `make test-thorough` or `make soak` runs, not `make test`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def thorough(cases: Iterable[Any]) -> list[Any]:
    """Mark cases for `make test-thorough` only: variations of cases that `make test` runs."""
    return [pytest.param(case, marks=pytest.mark.thorough) for case in cases]


def soak(cases: Iterable[Any]) -> list[Any]:
    """Mark cases for `make soak` only: those that take long."""
    return [pytest.param(case, marks=pytest.mark.soak) for case in cases]


def some(cases: Iterable[Any], of: int) -> list[Any]:
    """Mark all but every `of`-th case for `make test-thorough` only."""
    listed = list(cases)
    return only(listed, now=listed[::of])


def only(cases: Iterable[Any], now: Collection[Any]) -> list[Any]:
    """Mark all cases that are not in `now` for `make test-thorough` only."""
    return [case if case in now else thorough([case])[0] for case in cases]
