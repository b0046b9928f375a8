"""Threads of a test: OpenMP threads, and a thread that reads values while others train."""

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import pytest
import torch

Read = TypeVar("Read")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For ranks that are threads of one process: with more, they would wait for each other."""
    with torch_threads(1):
        yield


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
def snapshots(read: Callable[[], Read]) -> Iterator[set[Read]]:
    """Read values in another thread, as fast as it can, until the block ends."""
    seen, ended, interval = {read()}, threading.Event(), sys.getswitchinterval()

    def reader() -> None:
        while not ended.is_set():
            seen.add(read())

    # Switch threads often: the default of 5 ms is longer than a step.
    sys.setswitchinterval(1e-5)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(reader)
        try:
            yield seen
        finally:
            ended.set()
            sys.setswitchinterval(interval)
    reading.result()
