"""Find the fast form of a kernel that can run here. Import it only when it is first used."""

import builtins
import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, ModuleType
from typing import Any

from torch import Tensor

from torchcomp.engine import host

_log = logging.getLogger(__name__)
_LIBRARY = {"cpu": "numba", "cuda": "triton"}
# Device types whose fast forms failed in this process.
_failed: set[str] = set()


def _silent(*values: object, **options: Any) -> None:
    pass


_print = builtins.print if isinstance(builtins.print, BuiltinFunctionType) else _silent


@functools.cache
def fast_form(stem: str, device: str) -> ModuleType | None:
    """Return the module ``STEM_numba`` or ``STEM_triton`` for a device type, or None."""
    if device not in _LIBRARY or device in _failed:
        return None
    # Imported here, not at the top: importing Numba takes long, and it is an optional dependency.
    try:
        with _findable_print():
            return importlib.import_module(f"torchcomp.kernels.{stem}_{_LIBRARY[device]}")
    except ModuleNotFoundError as error:
        # No kernel has all forms. If this module exists, what it imports is missing.
        missing = error.name != f"torchcomp.kernels.{stem}_{_LIBRARY[device]}"
        if missing:
            package = {"cpu": '"torchcomp-ddp[kernels]"', "cuda": "triton"}[device]
            without_fast_forms(device, f"pip install {package} ({error})")
    except Exception as error:  # importing Numba or Triton can raise any type of exception
        without_fast_forms(device, f"{type(error).__name__}: {error}")
    return None


def host_form(stem: str, like: Tensor) -> Any:
    """Return the Numba form of a kernel for tensors like `like`, or None."""
    numba = _LIBRARY.get(like.device.type) == "numba" and host.can_read(like)
    return fast_form(stem, like.device.type) if numba else None


def device_form(stem: str, like: Tensor) -> Any:
    """Return the Triton form of a kernel for tensors like `like`, or None."""
    triton = _LIBRARY.get(like.device.type) == "triton"
    return fast_form(stem, like.device.type) if triton else None


def without_fast_forms(device: str, reason: str) -> None:
    """From now on, run all kernels of a device type in plain torch, and log one warning."""
    if device in _LIBRARY and device not in _failed:
        _failed.add(device)
        fast_form.cache_clear()
        library = _LIBRARY[device].capitalize()
        _log.warning("%s kernels run slowly, without %s: %s", device, library, reason)


def attempt(work: Callable[[], object], device: str) -> None:
    """Run `work` before training, to load and compile its kernels; in plain torch if that fails."""
    try:
        work()
    except Exception as error:  # a compiler can raise any type of exception
        # If it fails in plain torch as well, the kernels are not the cause.
        with plain_torch(device):
            work()
        without_fast_forms(device, f"{type(error).__name__}: {error}")


@contextmanager
def plain_torch(device: str) -> Iterator[None]:
    """Run all kernels of a device type in plain torch, in this block."""
    added = device not in _failed
    _failed.add(device)
    fast_form.cache_clear()
    try:
        yield
    finally:
        if added:
            _failed.remove(device)
            fast_form.cache_clear()


@contextmanager
def _findable_print() -> Iterator[None]:
    """Run with a `print` that can be found by its module and name, as Numba's import requires."""
    # Many training scripts silence all ranks but one by replacing `print` with a nested function.
    replaced, builtins.print = builtins.print, _print
    try:
        yield
    finally:
        builtins.print = replaced
