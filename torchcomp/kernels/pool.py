"""Pool: the threads that kernels share.

Numba's own parallel loops crash when several Python threads run them at once, which ranks as
threads and exchanges in the background do. Here the caller works along and takes helpers only as
they come free, so any number of threads may call at once, and none ever waits for an idle pool.
"""

import functools
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

INLINE = 1 << 17
"""Up to this many entries a second thread does not pay: handing over takes 0.1 ms (measured)."""

_CHUNKS = 4
"""Chunks for each thread, so that one that falls behind leaves work to the others."""


def chunks(entries: int, inline: int = INLINE) -> int:
    """In how many parts to cut work on `entries`; one, up to `inline` of them."""
    return 1 if entries <= inline else _CHUNKS * torch.get_num_threads()


def each(work: Callable[[int], object], count: int) -> None:
    """Call ``work(0)``, ..., ``work(count - 1)``, in no order, on up to torch.get_num_threads().

    `work` is safe to call from several threads at once and should release the GIL. Whatever it
    raised first is raised; then some calls may not have been made.
    """
    if count == 1:
        work(0)
        return
    turns = itertools.count()  # its next() is atomic

    def take_turns() -> None:
        while (turn := next(turns)) < count:
            work(turn)

    others = range(min(torch.get_num_threads(), count) - 1)
    helpers = [_shared().submit(take_turns) for _ in others]
    try:
        take_turns()
    finally:
        # Those that did not start have nothing left to do; the others still use the caller's data.
        started = [helper for helper in helpers if not helper.cancel()]
        errors = [helper.exception() for helper in started]
    for error in filter(None, errors):
        raise error


@functools.cache  # two threads may both make one at first: no harm, the loser's ends with its work
def _shared() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="torchcomp")


# A forked child inherits the executor but none of its threads.
os.register_at_fork(after_in_child=_shared.cache_clear)
