"""Select: the k entries of largest magnitude, exactly.

NaN and infinities rank equal and above every finite number; among equals the lowest index wins. So
the result is the same on every machine and in every form: plain torch and NumPy are the reference,
:mod:`.select_numba` is the CPU's and :mod:`.select_triton` CUDA's.
"""

from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from torchcomp.kernels import backend


class Scratch:
    """What one vector's selection keeps from step to step, to be faster; never in the result.

    It belongs to one thread at a time. Any instance may go with any vector.
    """

    def __init__(self) -> None:
        self.kept: object = None  # what the form that ran last wants back


def largest(x: Tensor, k: int, scratch: Scratch | None = None) -> Tensor:
    """Indices, ascending int64, of the `k` entries of largest magnitude of `x`.

    `x` is 1-D, fp16, bf16, fp32 or fp64. `scratch` is what the last call for a similar vector left.
    """
    if k in (0, x.numel()):
        return torch.arange(k, device=x.device)
    form = _fast(x)
    if form is not None:
        chosen: Tensor = form.select(x.detach().contiguous(), k, scratch or Scratch(), None)
        return chosen
    magnitude = x.detach().abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
    return largest_on_host(magnitude, k) if x.is_cpu else largest_on_device(magnitude, k)


def add_and_select(
    g: Tensor, e: Tensor, out: Tensor, k: int, scratch: Scratch | None = None
) -> Tensor:
    """``torch.add(g, e, out=out)`` and :func:`largest` of `out`, where possible in one pass.

    All three are 1-D and of one length; their dtypes may differ. `out` shares no memory with `g` or
    `e`.
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
    """The form that selects from `x` faster than the reference, if any.

    It offers ``select(x, k, scratch, summands)`` for 0 < k < n and contiguous tensors, for the
    dtypes and lengths that it names; `x` is written first if there are summands.
    """
    form = backend.fast_form("select", x.device.type)
    return form if form and x.dtype in form.DTYPES and x.numel() < form.LIMIT else None


def largest_on_host(magnitude: Tensor, k: int) -> Tensor:
    """The selection by NumPy, whose partition is vectorised: many times faster than torch.topk."""
    # NumPy knows no bfloat16 and is slow at float16; both convert exactly.
    wide = magnitude.to(torch.promote_types(magnitude.dtype, torch.float32)).numpy()
    threshold = np.partition(wide, -k)[-k]
    above = np.flatnonzero(wide > threshold)
    tied = np.flatnonzero(wide == threshold)[: k - above.size]
    return torch.from_numpy(np.sort(np.concatenate([above, tied])))


def largest_on_device(magnitude: Tensor, k: int) -> Tensor:
    """The selection in static shapes, so that the host never waits for an accelerator."""
    threshold = torch.topk(magnitude, k, sorted=False).values.min()
    above = magnitude > threshold
    tied = magnitude == threshold
    chosen = above | (tied & (tied.cumsum(0) <= k - above.sum()))
    return torch.nonzero_static(chosen, size=k).squeeze(1)
