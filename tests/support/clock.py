"""A clock for tests of what is measured."""

import threading

import torch


class Clock:
    """A clock of each thread, on which only what a test says takes time."""

    def __init__(self) -> None:
        self._local = threading.local()

    def mark(self, device: torch.device) -> float:
        return getattr(self._local, "now", 0.0)

    def advance(self, seconds: float) -> None:
        self._local.now = getattr(self._local, "now", 0.0) + seconds
