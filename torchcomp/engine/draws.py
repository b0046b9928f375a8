"""Draws: random numbers of a key, drawn one step ahead where the host must not stop to draw them.

NumPy draws on the host, so that all devices get the same numbers: tens of milliseconds for a large
bucket. For an accelerator, a thread draws those of the next step while this step runs.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcomp.engine import host
from torchcomp.engine.keys import Key

Draw = Callable[..., NDArray[Any]]


class Drawing:
    """Draws numbers for a device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_host = device, host.can_read(torch.empty(0, device=device))

    def __call__(self, draw: Draw, key: Key, *args: Any) -> Tensor:
        # Without it, a cache of `draw` would keep all numbers of an engine alive.
        plain = replace(key, ahead=None)
        if self._on_host:
            return torch.from_numpy(draw(plain, *args))
        ahead = key.ahead
        numbers = _pinned(draw, plain, args) if ahead is None else ahead.at(draw, plain, args)
        return host.copy_to(numbers, self._device)


class Ahead:
    """The numbers of this step and of the next one, for all vectors of one engine."""

    def __init__(self) -> None:
        # The thread of the exchange draws, and that of the user can clear.
        self._lock = threading.Lock()
        self._steps: dict[object, dict[int, Future[Tensor]]] = {}
        self._now = -1

    def at(self, draw: Draw, key: Key, args: tuple[Any, ...]) -> Tensor:
        """Return the numbers of a step on the host, and begin to draw those of the next."""
        vector = draw, replace(key, step=0), args
        with self._lock:
            if key.step != self._now:
                # Keep what was drawn ahead for this step. No other vector was asked for lately.
                self._steps = {v: own for v, own in self._steps.items() if key.step in own}
                self._now = key.step
            known = self._steps.get(vector, {})
            self._steps[vector] = drawing = {
                step: known.get(step)
                or _worker().submit(_pinned, draw, replace(key, step=step), args)
                for step in (key.step, key.step + 1)
            }
        return drawing[key.step].result()

    def clear(self) -> None:
        """Drop all numbers, when other vectors will need others."""
        with self._lock:
            self._steps.clear()


def _pinned(draw: Draw, key: Key, args: tuple[Any, ...]) -> Tensor:
    numbers = torch.from_numpy(draw(key, *args))
    # Pinned in the thread that draws: `host.copy_to` then only starts the copy.
    return numbers.pin_memory() if torch.cuda.is_available() else numbers


@lru_cache(maxsize=1)
def _worker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="torchcomp-draws")


# A forked process has no such thread.
os.register_at_fork(after_in_child=_worker.cache_clear)
