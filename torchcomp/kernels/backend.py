"""Which fast forms of the kernels can run here; each is imported only when it is first wanted."""

import functools
import importlib
import logging
from types import ModuleType

_log = logging.getLogger(__name__)
_LIBRARY = {"cpu": "numba", "cuda": "triton"}


@functools.cache
def fast_form(stem: str, device: str) -> ModuleType | None:
    """What does a kernel's work faster than torch on a type of device, if it has such a form.

    That is ``select_numba`` for "select" on a "cpu". One line in the log tells where Numba cannot
    be used. PyTorch's CUDA builds bring Triton along wherever it exists: there is nothing to tell.
    """
    if device not in _LIBRARY:
        return None
    try:
        return importlib.import_module(f"torchcomp.kernels.{stem}_{_LIBRARY[device]}")
    except ImportError as error:
        advice = f'pip install "torchcomp-ddp[kernels]" ({error})'
    except Exception as error:  # Numba's own import may fail in any way, its cache in others
        if device != "cpu":
            raise
        advice = f"its import failed with {type(error).__name__}: {error}"
    if device == "cpu":
        _log.warning("CPU kernel %s runs slowly without Numba: %s", stem, advice)
    return None
