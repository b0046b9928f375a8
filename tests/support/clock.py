"""A clock for tests of what is measured."""

import threading
from typing import Any

import torch

from torchcomp.advisor.moments import Moment


class Clock:
    """A clock of each thread, on which only what a test says takes time.

    What :meth:`exchange` says takes its time beside the thread until :meth:`join`.
    """

    def __init__(self) -> None:
        self._local: Any = threading.local()

    def read(self) -> float:
        return getattr(self._local, "now", 0.0)

    def moment(self, device: torch.device) -> Moment:
        return Moment(self.read(), 0.0)

    def advance(self, seconds: float) -> None:
        self._local.now = self.read() + seconds

    @property
    def is_alone(self) -> bool:
        return getattr(self._local, "inside", False)

    def exchange(self, seconds: float) -> None:
        if self.is_alone:
            self.advance(seconds)
        else:
            self._local.beside = max(self.read(), getattr(self._local, "beside", 0.0)) + seconds

    def join(self) -> None:
        self._local.now = max(self.read(), getattr(self._local, "beside", 0.0))

    def alone(self, call: Any) -> Any:
        """Return a function that is called with exchanges that nothing hides."""

        def called(*args: Any) -> Any:
            self._local.inside = True
            try:
                return call(*args)
            finally:
                self._local.inside = False

        return called
