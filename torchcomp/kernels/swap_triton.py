"""The conditional swap and fill in Triton. If the condition is false, a program reads one byte."""

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from torchcomp.kernels.launch import Launch
from torchcomp.kernels.triton_jit import kernel

_BLOCK = 8192


def launch(kind: str, condition: Tensor, x: Tensor, other: Tensor | float) -> None:
    """Swap ("swap") or fill ("fill") `x`, as :mod:`torchcomp.kernels.swap` does."""
    if x.numel():
        _launch_of(kind, x.numel(), x.get_device())(x, other, condition.view(1))


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
def _fill(x, value, condition, n, BLOCK: tl.constexpr):
    if tl.load(condition) != 0:
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(x + i, value, mask=i < n)
