"""Labels that show in a trace of torch.profiler what torchcomp does, bucket by bucket."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

from torch.autograd import profiler

P = ParamSpec("P")
R = TypeVar("R")


_current = threading.local()  # `bucket`: the one that this thread is averaging
OFF = nullcontext()
"""For a block without a label."""


def label(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Label a function, as :func:`span` does. One call if no profiler runs."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def labelled(*args: P.args, **kwargs: P.kwargs) -> R:
            with span(name) if profiler._is_profiler_enabled else OFF:
                return function(*args, **kwargs)

        return labelled

    return decorate


@contextmanager
def span(name: str, bucket: int | None = None) -> Iterator[None]:
    """Label a block: "torchcomp::encode bucket 3" in a trace.

    In a step, write ``with span("encode") if profiler._is_profiler_enabled else OFF:``, which makes
    no call while no profiler runs. The number of the bucket is for all labels inside the block, in
    this thread: routes and collectives do not know which bucket they work on.
    """
    if not profiler._is_profiler_enabled:  # torch's record_function takes 7 us even then
        yield
        return
    outer = getattr(_current, "bucket", None)
    _current.bucket = outer if bucket is None else bucket
    number = "" if _current.bucket is None else f" bucket {_current.bucket}"
    try:
        with profiler.record_function(f"torchcomp::{name}{number}"):
            yield
    finally:
        _current.bucket = outer
