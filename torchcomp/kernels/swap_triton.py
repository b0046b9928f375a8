"""The conditional swap and fill in Triton. If the condition is false, a program reads one byte."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from torchcomp.kernels.launch import Launch
from torchcomp.kernels.triton_jit import kernel

_BLOCK = 8192

_Launches = dict[tuple[int, int], Launch]
# By number of elements and device. A model has few buckets, so these stay small.
_swaps: _Launches = {}
_fills: _Launches = {}


def swap_where(condition: Tensor, a: Tensor, b: Tensor) -> None:
    """Swap the values of `a` and `b`, as :func:`torchcomp.kernels.swap.swap_where` does."""
    if a.numel():
        _launch_of(_swap, _swaps, a)(a, b, condition.view(1))


def fill_where(condition: Tensor, x: Tensor, value: float) -> None:
    """Fill `x`, as :func:`torchcomp.kernels.swap.fill_where` does."""
    if x.numel():
        _launch_of(_fill, _fills, x)(x, condition.view(1), value)


def _launch_of(function: Any, launches: _Launches, x: Tensor) -> Launch:
    """Return the launch of a kernel for tensors like `x`."""
    key = n, _ = x.numel(), x.get_device()
    launch = launches.get(key)
    if launch is None:
        grid = (triton.cdiv(n, _BLOCK),)
        launch = launches[key] = Launch(function, grid, n, warps=8, BLOCK=_BLOCK)
    return launch


@kernel("n")
def _swap(a, b, condition, n, BLOCK: tl.constexpr):
    if tl.load(condition) != 0:
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        first = tl.load(a + i, mask=i < n)
        second = tl.load(b + i, mask=i < n)
        tl.store(a + i, second, mask=i < n)
        tl.store(b + i, first, mask=i < n)


@kernel("n")
def _fill(x, condition, value, n, BLOCK: tl.constexpr):
    if tl.load(condition) != 0:
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(x + i, value, mask=i < n)
