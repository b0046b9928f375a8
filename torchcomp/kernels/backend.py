"""Find the fast form of a kernel that can run here. Import it only when it is first used."""

import functools
import importlib
import logging
from types import ModuleType

_log = logging.getLogger(__name__)
_LIBRARY = {"cpu": "numba", "cuda": "triton"}


@functools.cache
def fast_form(stem: str, device: str) -> ModuleType | None:
    """Return the module that runs a kernel faster than torch on a device type, or None.

    Args:
        stem: name of the kernel. "select" on "cpu" gives the module ``select_numba``.
        device: device type, such as "cpu" or "cuda".
    """
    if device not in _LIBRARY:
        return None
    # Imported here, not at the top: importing Numba takes long, and it is an optional dependency.
    try:
        return importlib.import_module(f"torchcomp.kernels.{stem}_{_LIBRARY[device]}")
    except ImportError as error:
        advice = f'pip install "torchcomp-ddp[kernels]" ({error})'
    except Exception as error:  # Numba's import and its cache can raise any type of exception
        if device != "cpu":
            raise
        advice = f"its import failed with {type(error).__name__}: {error}"
    # No warning for CUDA: PyTorch's CUDA builds install Triton wherever Triton exists.
    # functools.cache limits this to one warning per kernel.
    if device == "cpu":
        _log.warning("CPU kernel %s runs slowly without Numba: %s", stem, advice)
    return None
