"""What holds for the whole suite, however it was started."""

import random
import signal

import hypothesis
import numpy as np
import pytest
import torch

# A shell starts background jobs with SIGINT ignored, and all their children inherit that: the tests
# that interrupt a process would wait for an interrupt that never comes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples every time, and none that fails because the machine is busy.
hypothesis.settings.load_profile("ci")


@pytest.fixture(autouse=True)
def _global_generators() -> None:
    """A test that fails does so again, alone or among others: none draws what another has left."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
