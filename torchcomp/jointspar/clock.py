"""Clock: how long a backward pass takes, and how long each parameter of it."""

import time
from collections import defaultdict

import torch


class Clock:
    """Times backward passes on one device.

    The time of a parameter is what passes between its gradient's arrival and the one before it: the
    kernels of its own gradient and those of the activations in between.

    Attributes:
        by_parameter: seconds in all since :meth:`reset`, by name; gathered while `detailed`.
        detailed: whether to time parameters, for which a GPU has to wait at each of them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self.detailed = False
        self._span = 0.0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self.reset()

    @property
    def backward_ms(self) -> float:
        """Milliseconds of the last backward pass; 0.0 before one."""
        if self._events is None:
            return 1000 * self._span
        begin, end = self._events
        end.synchronize()
        return float(begin.elapsed_time(end))

    def reset(self) -> None:
        """Forget the times of parameters."""
        self.by_parameter: dict[str, float] = defaultdict(float)

    def begin(self) -> None:
        """A backward pass begins."""
        self._begin = self._last = self._now()
        if self._cuda:
            self._events = (_event(), _event())
            self._events[0].record()

    def arrived(self, name: str) -> None:
        """The gradient of a parameter is there."""
        if self.detailed:
            now = self._now()
            self.by_parameter[name] += now - self._last
            self._last = now

    def end(self) -> None:
        """All of its kernels are enqueued."""
        self._span = self._now() - self._begin
        if self._events is not None:
            self._events[1].record()

    def _now(self) -> float:
        if self._cuda and self.detailed:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
