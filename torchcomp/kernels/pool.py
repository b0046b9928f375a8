"""A thread pool that all kernels share.

Numba's own parallel loops crash when several Python threads run them concurrently, as ranks that
are threads do. Here the calling thread does part of the work, and none waits for a busy pool.
"""

import functools
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

INLINE = 1 << 17
"""Up to this many entries use one thread: submitting to another thread takes 0.1 ms (measured)."""

_CHUNKS = 4
"""Chunks per thread. If one thread is slow, the others take over its remaining chunks."""


def chunks(entries: int, inline: int = INLINE) -> int:
    """Return the number of parts to split work on `entries` into: 1 for up to `inline`."""
    return 1 if entries <= inline else _CHUNKS * torch.get_num_threads()


def each(work: Callable[[int], object], count: int) -> None:
    """Call ``work(0)``, ..., ``work(count - 1)`` in any order, on torch.get_num_threads() threads.

    `work` should release the GIL. An exception is raised here, and ends the calls.
    """
    if count == 1:
        work(0)
        return
    numbers = itertools.count()  # next() on it is atomic, so it needs no lock

    def run() -> None:
        while (number := next(numbers)) < count:
            work(number)

    others = range(min(torch.get_num_threads(), count) - 1)
    helpers = [_shared().submit(run) for _ in others]
    try:
        run()
    finally:
        # Cancel helpers that have not started: no work is left for them. Wait for the others,
        # because they still use the caller's data.
        started = [helper for helper in helpers if not helper.cancel()]
        errors = [helper.exception() for helper in started]
    for error in filter(None, errors):
        raise error


# If two threads race here, each gets its own executor. The one that is not cached is collected
# after its work, so this needs no lock.
@functools.cache
def _shared() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="torchcomp")


# A forked child inherits the executor but none of its threads: submitted work would never run.
os.register_at_fork(after_in_child=_shared.cache_clear)
