"""One thread per test: with vectors this short, more threads would only wait for each other."""

from collections.abc import Iterator

import pytest

from tests.support.threads import torch_threads


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield
