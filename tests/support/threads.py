"""Threads of a test: OpenMP threads, and a thread that reads counters while others train."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from torchcomp import Stats


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Let PyTorch use `number` threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def snapshots(read: Callable[[], Stats]) -> Iterator[set[Stats]]:
    """Read counters in another thread, as fast as it can, until the block ends."""
    seen, ended, interval = {read()}, threading.Event(), sys.getswitchinterval()

    def reader() -> None:
        while not ended.is_set():
            seen.add(read())

    thread = threading.Thread(target=reader)
    # Switch threads often: the default of 5 ms is longer than a step.
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(interval)
