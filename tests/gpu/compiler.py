"""The C compiler with which Triton builds what launches its kernels.

`tools/gpu.py` asks any Python that it finds, so this file imports only the standard library.
"""

import os
import shutil


def c_compiler() -> str | None:
    """Return the path of the compiler, or None. Triton takes CC if set, else gcc or clang."""
    named = os.environ.get("CC")
    names = ("gcc", "clang") if named is None else (named,)
    return next(filter(None, map(shutil.which, names)), None)
