"""Measure the time that threads spend inside blocking collectives of torch.distributed.

The functions of torch.distributed are replaced by timed ones. Collectives that are issued
asynchronously (PyTorch's own hooks) or in C++ (plain DDP) cannot be timed this way.
"""

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_NAMES = (
    "all_reduce",
    "all_gather",
    "all_gather_single",
    "all_gather_into_tensor",
    "all_to_all",
    "all_to_all_single",
    "reduce_scatter_tensor",
    "broadcast",
)


class CollectiveClock:
    """The time spent in blocking collectives, summed over threads."""

    def __init__(self) -> None:
        self._seconds, self._blocking, self._asynchronous = 0.0, 0, 0

    def install(self) -> None:
        """Time every collective from now on. Call this before torchcomp is imported."""
        # A module that was imported earlier can hold the original functions.
        for name in _NAMES:
            if hasattr(dist, name):
                setattr(dist, name, self._timed(getattr(dist, name)))

    def reset(self) -> None:
        self._seconds, self._blocking, self._asynchronous = 0.0, 0, 0

    @property
    def seconds(self) -> float | None:
        """Seconds since the last reset; None unless all collectives were blocking."""
        return self._seconds if self._blocking and not self._asynchronous else None

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            outcome = function(*arguments, **named)
            self._seconds += time.perf_counter() - started
            # An asynchronous call returns a Work object, a blocking one returns None.
            self._blocking += outcome is None
            self._asynchronous += outcome is not None
            return outcome

        return timed
