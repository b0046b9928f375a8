"""Exact selection of the k entries of largest magnitude.

NaN and infinities rank equal, and above every finite number. Among equal magnitudes the lowest
index wins. The result is therefore the same on every machine and in every form. Plain torch and
NumPy are the reference, :mod:`.select_numba` is for the CPU and :mod:`.select_triton` for CUDA.
"""

from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from torchcomp import host
from torchcomp.kernels import backend


class Scratch:
    """A workspace that makes the selection from similar vectors faster from step to step.

    It never affects the result, and any instance can be used with any vector. Only one thread can
    use an instance at a time.
    """

    def __init__(self) -> None:
        # Private to the form that ran last. A form must check the type before it uses this.
        self.kept: object = None


def largest(x: Tensor, k: int, scratch: Scratch | None = None) -> Tensor:
    """Return the indices of the `k` entries of `x` with the largest magnitude.

    Args:
        x: 1-D, fp16, bf16, fp32 or fp64.
        k: number of entries to select.
        scratch: the workspace of the last call for a similar vector.

    Returns:
        1-D int64, ascending.
    """
    # The fast forms require 0 < k < n.
    if k in (0, x.numel()):
        return torch.arange(k, device=x.device)
    form = _fast(x)
    if form is not None:
        chosen: Tensor = form.select(x.detach().contiguous(), k, scratch or Scratch(), None)
        return chosen
    magnitude = x.detach().abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
    return largest_on_host(magnitude, k) if host.can_read(x) else largest_on_device(magnitude, k)


def add_and_select(
    g: Tensor, e: Tensor, out: Tensor, k: int, scratch: Scratch | None = None
) -> Tensor:
    """Compute ``torch.add(g, e, out=out)`` and :func:`largest` of `out`, in one pass if possible.

    All three tensors are 1-D with equal length, and their dtypes can differ. `out` must not share
    memory with `g` or `e`.
    """
    form = _fast(out) if 0 < k < out.numel() else None
    if (
        form is not None
        and (g.dtype, e.dtype, out.dtype) in form.SUMS
        and all(x.is_contiguous() for x in (g, e, out))
    ):
        summands = g.detach(), e.detach()
        chosen: Tensor = form.select(out.detach(), k, scratch or Scratch(), summands)
        return chosen
    torch.add(g, e, out=out)
    return largest(out, k, scratch)


def _fast(x: Tensor) -> ModuleType | None:
    """Return the form that selects from `x` faster than the reference, or None.

    A form has a function ``select(x, k, scratch, summands)`` for 0 < k < n and contiguous tensors.
    If `summands` is not None, the function first writes their sum to `x`. The constants ``DTYPES``,
    ``LIMIT`` and ``SUMS`` list what the form supports.
    """
    form = backend.fast_form("select", x.device.type)
    return form if form and x.dtype in form.DTYPES and x.numel() < form.LIMIT else None


def largest_on_host(magnitude: Tensor, k: int) -> Tensor:
    """Select with NumPy. Its partition is vectorized and many times faster than torch.topk."""
    # NumPy has no bfloat16 and is slow with float16. Both convert to float32 exactly.
    wide = magnitude.to(torch.promote_types(magnitude.dtype, torch.float32)).numpy()
    # A full sort is not needed: partition only puts the k-th largest where a sort would.
    threshold = np.partition(wide, -k)[-k]
    above = np.flatnonzero(wide > threshold)
    # flatnonzero ascends, so this keeps the ties with the lowest indices.
    tied = np.flatnonzero(wide == threshold)[: k - above.size]
    return torch.from_numpy(np.sort(np.concatenate([above, tied])))


def largest_on_device(magnitude: Tensor, k: int) -> Tensor:
    """Select with static shapes, so that the host never waits for an accelerator."""
    threshold = torch.topk(magnitude, k, sorted=False).values.min()
    above = magnitude > threshold
    tied = magnitude == threshold
    # The running count of ties keeps those with the lowest indices.
    chosen = above | (tied & (tied.cumsum(0) <= k - above.sum()))
    return torch.nonzero_static(chosen, size=k).squeeze(1)
