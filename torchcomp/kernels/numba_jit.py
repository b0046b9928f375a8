"""What Numba kernels have in common. Import it only with Numba installed."""

import functools
import logging
from collections.abc import Callable
from typing import Any

from numba import njit

_log = logging.getLogger(__name__)


def kernel(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function without the GIL, and keep the result on disk where that is possible."""

    def compile_kernel(function: Callable[..., Any]) -> Any:
        try:
            return njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:  # neither the package's folder nor the user's can be written
            _warn_once()
            return njit(nogil=True, **options)(function)

    return compile_kernel


# Cached, so that it warns once and not for every kernel.
@functools.cache
def _warn_once() -> None:
    _log.warning(
        "Numba cannot store compiled kernels, so every process compiles them again, which takes "
        "seconds. Set NUMBA_CACHE_DIR to a folder that can be written"
    )
