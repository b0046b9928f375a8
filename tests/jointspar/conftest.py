"""Fixtures of the tests of JointSpar."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    # Ranks are threads of one process. With OpenMP threads as well, they would wait for each other.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
