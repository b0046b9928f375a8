"""Pool: the threads that kernels share.

Numba's own parallel loops crash when several Python threads run them at once, which ranks as
threads and exchanges in the background do. Here the caller works along and takes helpers only as
they come free, so any number of threads may call at once, and none ever waits for an idle pool.
"""

import itertools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

_CHUNKS = 4
"""Chunks for each thread, so that one that falls behind leaves work to the others."""

_executor: ThreadPoolExecutor | None = None


def chunks() -> int:
    """In how many parts to cut work for :func:`each`, if it can be cut anywhere."""
    return _CHUNKS * torch.get_num_threads()


def each(work: Callable[[int], object], count: int) -> None:
    """Call ``work(0)``, ..., ``work(count - 1)``, in no order, on up to torch.get_num_threads().

    Args:
        work: safe to call from several threads at once; should release the GIL.
        count: number of calls.

    Raises:
        Exception: whatever `work` raised first; then some calls may not have been made.
    """
    turns = itertools.count()  # its next() is atomic

    def take_turns() -> None:
        while (turn := next(turns)) < count:
            work(turn)

    helpers = _helpers(take_turns, min(torch.get_num_threads(), count) - 1)
    try:
        take_turns()
    finally:
        # Those that did not start have nothing left to do; the others still use the caller's data.
        started = [helper for helper in helpers if not helper.cancel()]
        errors = [helper.exception() for helper in started]
    for error in filter(None, errors):
        raise error


def _helpers(work: Callable[[], None], count: int) -> list[Future[None]]:
    if count <= 0:
        return []
    executor = _shared()
    return [executor.submit(work) for _ in range(count)]


def _shared() -> ThreadPoolExecutor:
    """The executor, made when it is first wanted; its threads start one by one, when needed."""
    global _executor
    # Two threads may both make one here. No harm: the loser's ends with its work.
    if _executor is None:
        _executor = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="torchcomp")
    return _executor


def _forget() -> None:
    global _executor
    _executor = None


# A forked child inherits the executor but none of its threads.
os.register_at_fork(after_in_child=_forget)
