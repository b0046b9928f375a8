"""Which fast forms of the kernels can run here; each is imported only when it is first wanted."""

import functools
import importlib
import logging
from types import ModuleType

_log = logging.getLogger(__name__)


@functools.cache
def numba_form(stem: str) -> ModuleType | None:
    """The Numba form of a kernel, for the CPU, e.g. ``select_numba`` for "select".

    None, with one line in the log, where it cannot be imported.
    """
    try:
        return importlib.import_module(f"torchcomp.kernels.{stem}_numba")
    except ImportError as error:
        advice = 'pip install "torchcomp-ddp[kernels]"'
        _log.warning("CPU kernel %s runs slowly without Numba (%s): %s", stem, error, advice)
        return None


@functools.cache
def triton_form(stem: str) -> ModuleType | None:
    """The Triton form of a kernel, for CUDA; None where Triton is missing, without a word.

    PyTorch's CUDA builds bring Triton along wherever it exists, so there is nothing to advise.
    """
    try:
        return importlib.import_module(f"torchcomp.kernels.{stem}_triton")
    except ImportError:
        return None
