"""Which cases `make test` runs, and which are left to `make test-thorough`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def thorough(cases: Iterable[Any]) -> list[Any]:
    """The same cases, for `make test-thorough` alone: more of what other cases check in part."""
    return [pytest.param(case, marks=pytest.mark.thorough) for case in cases]


def some(cases: Iterable[Any], of: int) -> list[Any]:
    """Every `of`-th case; the others are left to `make test-thorough`."""
    listed = list(cases)
    return only(listed, now=listed[::of])


def only(cases: Iterable[Any], now: Collection[Any]) -> list[Any]:
    """The cases that are among `now`; the others are left to `make test-thorough`."""
    return [case if case in now else thorough([case])[0] for case in cases]
