"""Collect these tests only where TRITON_INTERPRET=1 makes Triton interpret kernels."""

import os
from importlib.metadata import PackageNotFoundError, version


def _interpreted() -> bool:
    # Older interpreters cannot run the tests, or compute other numbers.
    try:
        new = tuple(map(int, version("triton").split(".")[:2])) >= (3, 7)
    except PackageNotFoundError:
        return False
    return new and os.environ.get("TRITON_INTERPRET") == "1"


# Triton decides when it is imported. A process with other tests must not be changed by these.
collect_ignore_glob = [] if _interpreted() else ["test_*.py"]
