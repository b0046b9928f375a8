"""Labels that show in a trace of torch.profiler what torchcomp does, bucket by bucket."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch.autograd import profiler

_current = threading.local()  # `bucket`: the one that this thread is averaging
OFF = nullcontext()
"""For a block without a label."""


@contextmanager
def span(name: str, bucket: int | None = None) -> Iterator[None]:
    """Label a block, or a function: "torchcomp::encode bucket 3" in a trace.

    Without a profiler, ``with span("encode") if profiler._is_profiler_enabled else OFF:`` makes no
    call. The number of the bucket is for all labels inside the block, in this thread.
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
