"""Labels that show in a trace of torch.profiler what torchcomp does, bucket by bucket."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch.autograd import profiler


class _Current(threading.local):
    """The bucket that this thread is averaging."""

    bucket: int | None = None


_current = _Current()


@contextmanager
def bucket_number(number: int) -> Iterator[None]:
    """Add the number of a bucket to all labels of the block, in this thread."""
    # Here and not in an argument: routes and collectives do not know which bucket they work on.
    _current.bucket = number
    try:
        yield
    finally:
        _current.bucket = None


@contextmanager
def label(name: str) -> Iterator[None]:
    """Label a block or, as a decorator, a function: "torchcomp::encode bucket 3" in a trace."""
    # torch's record_function takes 7 us even if no profiler runs, and this test 1 us. The flag is
    # private: a torch without it gets all labels at their price.
    if not getattr(profiler, "_is_profiler_enabled", True):
        yield
        return
    number = "" if _current.bucket is None else f" bucket {_current.bucket}"
    with profiler.record_function(f"torchcomp::{name}{number}"):
        yield
