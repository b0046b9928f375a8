"""Which cases `make test` runs, and which are left to `make test-thorough`."""

from collections.abc import Iterable
from typing import Any

import pytest


def thorough(cases: Iterable[Any]) -> list[Any]:
    """The same cases, for `make test-thorough` alone: more of what other cases check in part."""
    return [pytest.param(case, marks=pytest.mark.thorough) for case in cases]


def some(cases: Iterable[Any], of: int) -> list[Any]:
    """One of every so many cases; the others for `make test-thorough`."""
    return [case if i % of == 0 else thorough([case])[0] for i, case in enumerate(cases)]
