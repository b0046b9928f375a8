"""Launch: one kernel of Triton, prepared once. Triton's own way takes 20 to 50 us a launch."""

import logging
from typing import Any

import torch
import triton
from torch import Tensor

from torchcomp.kernels.triton_jit import EXACT

_log = logging.getLogger(__name__)

_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))

_TAKES_CONSTANTS = _VERSION >= (3, 3)
"""Whether a compiled kernel is also given the arguments that are constants."""


class _Quick:
    """Whether compiled kernels go to the driver directly, as Triton 3.2 to 3.7 pass them."""

    on = (3, 2) <= _VERSION < (3, 8)


class Launch:
    """A kernel with all arguments that stay the same: those after the changing ones, and constants.

    Integers are in its ``do_not_specialize``. `grid` has one or two numbers of programs.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], *fixed: Any, warps: int = 4, **constants: Any
    ) -> None:
        self._kernel, self._grid = kernel, (*grid, 1, 1)[:3]
        self._fixed, self._constants = fixed, constants
        self._options = {**constants, "num_warps": warps, **EXACT}
        # By the classes of what changes: the compiled kernel's launcher and handles.
        self._compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __call__(self, x: Tensor, *changing: Any, programs: int | None = None) -> None:
        """Launch the kernel on the device of `x`, its first argument."""
        grid = self._grid if programs is None else (programs, *self._grid[1:])
        address = x.data_ptr()
        # Triton compiles one form for pointers to multiples of 16 bytes, and one for others.
        kind, passed = [x.dtype, address % 16 == 0], [address]
        for value in changing:
            if isinstance(value, Tensor):
                address = value.data_ptr()
                kind += value.dtype, address % 16 == 0
                passed.append(address)
            else:
                passed.append(value)
        known = self._compiled.get(tuple(kind))
        if known is not None and _Quick.on:
            run, function, metadata, index, stream_of, rest = known
            try:
                if torch.cuda.current_device() == index:
                    stream = stream_of(index)
                    run(*grid, stream, function, metadata, None, None, None, *passed, *rest)
                    return
            except Exception as error:  # a driver can raise any type of exception
                _Quick.on = False
                _log.debug("kernels are launched the slow way from now on: %s", error)
        compiled = plain(self._kernel, grid, (x, *changing, *self._fixed), self._options)
        if _Quick.on and x.is_cuda and hasattr(compiled, "packed_metadata"):
            self._compiled[tuple(kind)] = self._prepared(compiled, x.device.index)

    def _prepared(self, compiled: Any, index: int) -> tuple[Any, ...]:
        rest = [a.data_ptr() if isinstance(a, Tensor) else a for a in self._fixed]
        if _TAKES_CONSTANTS:
            names = self._kernel.arg_names
            rest += [self._constants[name] for name in names if name in self._constants]
        stream_of = triton.runtime.driver.active.get_current_stream
        handles = compiled.run, compiled.function, compiled.packed_metadata
        return *handles, index, stream_of, tuple(rest)


def plain(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Launch a kernel Triton's own way, on the device of its first argument."""
    x = arguments[0]
    # It launches on the current device. -1 changes nothing: in Triton's interpreter, tensors are on
    # the CPU.
    with torch.cuda.device(x.device.index if x.is_cuda else -1):
        return kernel[grid](*arguments, **options)
