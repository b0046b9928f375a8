"""The conditional swap and fill in Triton. If the condition is false, a program reads one byte."""

import triton
import triton.language as tl
from torch import Tensor

from torchcomp.kernels.launch import Launch
from torchcomp.kernels.triton_jit import kernel

_BLOCK = 8192

# By number of elements and device. A model has few buckets, so this stays small.
_swaps: dict[tuple[int, int], Launch] = {}
_fills: dict[tuple[int, int], Launch] = {}


def swap_where(condition: Tensor, a: Tensor, b: Tensor) -> None:
    """Swap the values of `a` and `b`, as :func:`torchcomp.kernels.swap.swap_where` does."""
    if n := a.numel():
        key = n, a.get_device()
        launch = _swaps.get(key)
        if launch is None:
            grid = (triton.cdiv(n, _BLOCK),)
            launch = _swaps[key] = Launch(_swap, grid, n, warps=8, BLOCK=_BLOCK)
        launch(a, b, condition.view(1))


def fill_where(condition: Tensor, x: Tensor, value: float) -> None:
    """Fill `x`, as :func:`torchcomp.kernels.swap.fill_where` does."""
    if n := x.numel():
        key = n, x.get_device()
        launch = _fills.get(key)
        if launch is None:
            grid = (triton.cdiv(n, _BLOCK),)
            launch = _fills[key] = Launch(_fill, grid, n, warps=8, BLOCK=_BLOCK)
        launch(x, condition.view(1), value)


@kernel("n")
def _swap(
    a: tl.tensor, b: tl.tensor, condition: tl.tensor, n: tl.tensor, BLOCK: tl.constexpr
) -> None:
    if tl.load(condition) != 0:
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        first = tl.load(a + i, mask=i < n)
        second = tl.load(b + i, mask=i < n)
        tl.store(a + i, second, mask=i < n)
        tl.store(b + i, first, mask=i < n)


@kernel("n")
def _fill(
    x: tl.tensor, condition: tl.tensor, value: tl.tensor, n: tl.tensor, BLOCK: tl.constexpr
) -> None:
    if tl.load(condition) != 0:
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(x + i, value.to(x.dtype.element_ty), mask=i < n)
