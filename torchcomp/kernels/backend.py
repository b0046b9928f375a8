"""Which fast forms of the kernels can run here; each is imported only when it is first wanted."""

import functools
import importlib
import logging
from types import ModuleType

_log = logging.getLogger(__name__)


@functools.cache
def numba_form(stem: str) -> ModuleType | None:
    """The Numba form of a kernel, for the CPU, e.g. ``select_numba`` for "select".

    None, with one line in the log, where it cannot be used.
    """
    try:
        return importlib.import_module(f"torchcomp.kernels.{stem}_numba")
    except ImportError as error:
        advice = f'pip install "torchcomp-ddp[kernels]" ({error})'
    except Exception as error:  # Numba's own import may fail in any way, its cache in others
        advice = f"its import failed with {type(error).__name__}: {error}"
    _log.warning("CPU kernel %s runs slowly without Numba: %s", stem, advice)
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
