"""Fixtures of the tests of JointSpar."""

import pytest

from tests.support.threads import torch_threads


@pytest.fixture(autouse=True)
def _one_thread():
    # Ranks are threads of one process. With OpenMP threads as well, they would wait for each other.
    with torch_threads(1):
        yield
