"""Select: the k entries of largest magnitude, exactly.

NaN and infinities rank equal and above every finite number; among equals the lowest index wins. So
the result is the same on every machine and in every form: :mod:`.select_torch` is the reference,
:mod:`.select_numba` the CPU's and :mod:`.select_triton` CUDA's.
"""

from typing import Protocol, cast

import torch
from torch import Tensor

from torchcomp.kernels import backend, select_torch


class Warm:
    """What one vector's selection keeps from step to step, to be faster; never in the result.

    It belongs to one thread at a time. Any instance may go with any vector.

    Attributes:
        memo: what the form that ran last wants back; None at the start.
    """

    def __init__(self) -> None:
        self.memo: object = None


def largest(x: Tensor, k: int, warm: Warm | None = None) -> Tensor:
    """Indices, ascending, of the `k` entries of largest magnitude; ties go to the lowest index.

    Args:
        x: 1-D, of n entries, fp16, bf16, fp32 or fp64; NaN counts as infinite.
        k: 0 to n.
        warm: what the last call for a similar vector left.

    Returns:
        1-D int64 tensor of `k` distinct indices, on the device of `x`.

    Raises:
        ValueError: if `k` is out of range.
    """
    _check(k, x.numel())
    if k in (0, x.numel()):
        return torch.arange(k, device=x.device)
    fast = _fast(x)
    if fast is None:
        return select_torch.largest(x, k)
    return fast.largest(x.detach().contiguous(), k, warm or Warm())


def add_and_select(g: Tensor, e: Tensor, out: Tensor, k: int, warm: Warm | None = None) -> Tensor:
    """``torch.add(g, e, out=out)`` and :func:`largest` of `out`, where possible in one pass.

    Args:
        g: 1-D, of n entries, fp16, bf16, fp32 or fp64.
        e: like `g`; its dtype may differ.
        out: like `g`, written; its dtype may differ. Shares no memory with `g` or `e`.
        k: 0 to n.
        warm: what the last call for a similar vector left.

    Returns:
        1-D int64 tensor of `k` distinct indices, on the device of `out`.

    Raises:
        ValueError: if `k` is out of range.
    """
    _check(k, out.numel())
    fast = _fast(out) if 0 < k < out.numel() else None
    if fast is None or not fast.adds(g, e, out):
        torch.add(g, e, out=out)
        return largest(out, k, warm)
    return fast.add_and_select(g.detach(), e.detach(), out.detach(), k, warm or Warm())


Scratch = Warm


class _Form(Protocol):
    """What a fast form offers; both functions want 0 < k < n."""

    def takes(self, x: Tensor) -> bool: ...
    def largest(self, x: Tensor, k: int, warm: Warm) -> Tensor: ...
    def adds(self, g: Tensor, e: Tensor, out: Tensor) -> bool: ...
    def add_and_select(self, g: Tensor, e: Tensor, out: Tensor, k: int, warm: Warm) -> Tensor: ...


def _fast(x: Tensor) -> _Form | None:
    """The form that selects from `x` faster than the reference, if any."""
    load = {"cpu": backend.numba_form, "cuda": backend.triton_form}.get(x.device.type)
    form = cast("_Form | None", load("select") if load else None)
    return form if form and form.takes(x) else None


def _check(k: int, n: int) -> None:
    if not 0 <= k <= n:
        raise ValueError(f"cannot select {k} of {n} entries")
