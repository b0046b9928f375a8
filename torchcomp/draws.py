"""Draws: random numbers of a key, drawn one step ahead where the host must not stop to draw them.

NumPy draws on the host, so that all devices get the same numbers. That takes tens of milliseconds
for a large bucket. For an accelerator, a thread therefore draws the numbers of the next step while
this step runs.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcomp import host
from torchcomp.keys import Key

Draw = Callable[..., NDArray[Any]]


def drawn(draw: Draw, key: Key, *args: Any, like: Tensor) -> Tensor:
    """Return ``draw(key, *args)`` on the device of `like`.

    Args:
        draw: a function without state.
        key: key of the numbers.
        args: further arguments, hashable.
        like: a tensor on the device that needs the numbers.
    """
    if host.can_read(like):
        return torch.from_numpy(draw(key, *args))
    series = _series(draw, replace(key, step=0), args, like.device)
    return host.copy_to(series.at(key.step), like.device)


class _Series:
    """The draws of one vector, step after step."""

    def __init__(self, draw: Callable[[int], Tensor]) -> None:
        self._draw = draw
        self._lock = threading.Lock()
        self._steps: dict[int, Future[Tensor]] = {}

    def at(self, step: int) -> Tensor:
        """Return the numbers of a step, and begin to draw those of the next."""
        # Two models with parameters of the same names share their draws.
        with self._lock:
            for each in (step, step + 1):
                if each not in self._steps:
                    self._steps[each] = _worker().submit(self._draw, each)
            self._steps = {each: self._steps[each] for each in (step, step + 1)}
            ready = self._steps[step]
        return ready.result()


@lru_cache(maxsize=1024)
def _series(draw: Draw, key: Key, args: tuple[Any, ...], device: torch.device) -> _Series:
    def at(step: int) -> Tensor:
        numbers = torch.from_numpy(draw(replace(key, step=step), *args))
        # Pinned here, in the thread: `host.copy_to` then only starts the copy.
        return numbers.pin_memory() if device.type == "cuda" else numbers

    return _Series(at)


@lru_cache(maxsize=1)
def _worker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="torchcomp-draws")
