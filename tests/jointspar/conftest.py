"""What the tests of JointSpar share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    # Ranks are threads here already: theirs would wait for each other's.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
