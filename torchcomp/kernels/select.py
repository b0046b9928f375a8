"""Select: the k entries of largest magnitude, exactly.

NaN and infinities rank equal and above every finite number; among equals the lowest index wins. So
the result is the same on every machine and in every form: :mod:`.select_torch` is the reference,
:mod:`.select_numba` the CPU's and :mod:`.select_triton` CUDA's.
"""

from types import ModuleType

import torch
from torch import Tensor

from torchcomp.kernels import backend, select_torch


class Scratch:
    """What one vector's selection keeps from step to step, to be faster; never in the result.

    It belongs to one thread at a time. Any instance may go with any vector.

    Attributes:
        kept: what the form that ran last wants back; None at the start.
    """

    def __init__(self) -> None:
        self.kept: object = None


def largest(x: Tensor, k: int, scratch: Scratch | None = None) -> Tensor:
    """Indices, ascending, of the `k` entries of largest magnitude; ties go to the lowest index.

    Args:
        x: 1-D, of n entries, fp16, bf16, fp32 or fp64; NaN counts as infinite.
        k: 0 to n.
        scratch: what the last call for a similar vector left.

    Returns:
        1-D int64 tensor of `k` distinct indices, on the device of `x`.

    Raises:
        ValueError: if `k` is out of range.
    """
    n = x.numel()
    if not 0 <= k <= n:
        raise ValueError(f"cannot select {k} of {n} entries")
    if k in (0, n):
        return torch.arange(k, device=x.device)
    form = _fast(x)
    if form is None:
        return select_torch.largest(x, k)
    chosen: Tensor = form.select(x.detach().contiguous(), k, scratch or Scratch(), None)
    return chosen


def add_and_select(
    g: Tensor, e: Tensor, out: Tensor, k: int, scratch: Scratch | None = None
) -> Tensor:
    """``torch.add(g, e, out=out)`` and :func:`largest` of `out`, where possible in one pass.

    Args:
        g: 1-D, of n entries, fp16, bf16, fp32 or fp64.
        e: like `g`; its dtype may differ.
        out: like `g`, written; its dtype may differ. Shares no memory with `g` or `e`.
        k: 0 to n.
        scratch: what the last call for a similar vector left.

    Returns:
        1-D int64 tensor of `k` distinct indices, on the device of `out`.

    Raises:
        ValueError: if `k` is out of range.
    """
    form = _fast(out) if 0 < k < out.numel() else None
    if form is None or not (
        (g.dtype, e.dtype, out.dtype) in form.SUMS
        and g.shape == e.shape == out.shape
        and g.device == e.device == out.device
        and g.is_contiguous()
        and e.is_contiguous()
        and out.is_contiguous()
    ):
        if 0 <= k <= out.numel():
            torch.add(g, e, out=out)
        return largest(out, k, scratch)
    summands = g.detach(), e.detach()
    chosen: Tensor = form.select(out.detach(), k, scratch or Scratch(), summands)
    return chosen


def _fast(x: Tensor) -> ModuleType | None:
    """The form that selects from `x` faster than the reference, if any.

    It offers ``select(x, k, scratch, summands)`` for 0 < k < n and contiguous tensors, for the
    dtypes and lengths that it names; `x` is written first if there are summands.
    """
    load = {"cpu": backend.numba_form, "cuda": backend.triton_form}.get(x.device.type)
    form = load("select") if load else None
    return form if form and x.dtype in form.DTYPES and x.numel() < form.LIMIT else None
