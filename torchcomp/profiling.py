"""Labels that show in a trace of torch.profiler what torchcomp does, bucket by bucket."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch.autograd import profiler

Given = ParamSpec("Given")
Returned = TypeVar("Returned")


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


class label:
    """Label a block or, as a decorator, a function: "torchcomp::encode bucket 3" in a trace."""

    # contextlib's decorators take 10 us per call.
    def __init__(self, name: str) -> None:
        self._name = name
        self._recorded: profiler.record_function | None = None

    def __call__(self, function: Callable[Given, Returned]) -> Callable[Given, Returned]:
        @wraps(function)
        def labelled(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
            with label(self._name):
                return function(*args, **kwargs)

        return labelled

    def __enter__(self) -> None:
        # torch's record_function takes 7 us even if no profiler runs, and this test less than 1 us.
        # The flag is private: a torch without it gets all labels at their price.
        if getattr(profiler, "_is_profiler_enabled", True):
            number = "" if _current.bucket is None else f" bucket {_current.bucket}"
            self._recorded = profiler.record_function(f"torchcomp::{self._name}{number}")
            self._recorded.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        recorded, self._recorded = self._recorded, None
        if recorded is not None:
            recorded.__exit__(*error)
