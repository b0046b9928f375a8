"""The conditional swap and fill in Triton. If the condition is false, a program reads one byte."""

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from torchcomp.kernels.launch import Launch
from torchcomp.kernels.triton_jit import kernel

_BLOCK = 8192


def swap_where(condition: Tensor, a: Tensor, b: Tensor) -> None:
    """Swap the values of `a` and `b`, as :func:`torchcomp.kernels.swap.swap_where` does."""
    if a.numel():
        _launch_of("swap", a.numel(), a.get_device())(a, b, condition.view(1))


def fill_where(condition: Tensor, x: Tensor, value: float) -> None:
    """Fill `x`, as :func:`torchcomp.kernels.swap.fill_where` does."""
    if x.numel():
        _launch_of("fill", x.numel(), x.get_device())(x, condition.view(1), value)


@cache  # a model has few buckets
def _launch_of(kind: str, n: int, device: int) -> Launch:
    kernel = _swap if kind == "swap" else _fill
    return Launch(kernel, (triton.cdiv(n, _BLOCK),), n, warps=8, BLOCK=_BLOCK)


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
