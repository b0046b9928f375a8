"""The conditional swap in Triton. If the condition is false, a program reads one byte and ends."""

import triton
import triton.language as tl
from torch import Tensor

from torchcomp.kernels.triton_jit import EXACT, kernel, on_device_of

_BLOCK = 8192


def swap_where(condition: Tensor, a: Tensor, b: Tensor) -> None:
    """Swap the values of `a` and `b`, as :func:`torchcomp.kernels.swap.swap_where` does."""
    n = a.numel()
    if n:
        with on_device_of(a):
            _swap[(triton.cdiv(n, _BLOCK),)](
                condition.view(-1), a, b, n, BLOCK=_BLOCK, num_warps=8, **EXACT
            )


@kernel("n")
def _swap(
    condition: tl.tensor, a: tl.tensor, b: tl.tensor, n: tl.tensor, BLOCK: tl.constexpr
) -> None:
    if tl.load(condition) != 0:
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        first = tl.load(a + i, mask=i < n)
        second = tl.load(b + i, mask=i < n)
        tl.store(a + i, second, mask=i < n)
        tl.store(b + i, first, mask=i < n)
