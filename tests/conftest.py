"""Settings for the whole test suite, however it is started."""

import gc
import os
import random
import signal
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest
import torch

# A shell starts background jobs with SIGINT ignored, and their children inherit this. Without a
# handler, the tests that interrupt a process would wait forever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Several workers share the cores, and a thread of OpenMP that waits keeps one busy. The number of
# threads also changes how sums are split and rounded.
torch.set_num_threads(1)

_MANY_THREADS = 100

# The "ci" profile draws the same examples in every run and has no deadline.
hypothesis.settings.load_profile("ci")


def pytest_collection_finish() -> None:
    """Leave what is imported and collected to the end of the process.

    It is a million objects, and the garbage collector would go through them again and again.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _few_threads() -> Iterator[None]:
    """End process groups of gloo that await the garbage collector.

    Their threads wake up a hundred times per second, and would slow down all later tests.
    """
    yield
    if len(os.listdir("/proc/self/task")) > _MANY_THREADS:
        gc.collect()


@pytest.fixture(autouse=True)
def _global_generators() -> None:
    """Seed the global generators, so that a test gives the same result alone and in the suite."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
