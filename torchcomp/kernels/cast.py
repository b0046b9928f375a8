"""Cast: to a floating-point dtype of less range without making infinities, and a test for them."""

import torch
from torch import Tensor


def narrow(x: Tensor, dtype: torch.dtype, out: Tensor | None = None, share: float = 1.0) -> Tensor:
    """`x` in another dtype; finite values beyond its range become its largest, of the same sign.

    With error feedback the residual keeps what is cut off. NaN and infinities stay. If `x` has a
    larger range, its values stay within `share` of that of `dtype`; else this is ``x.to(dtype)``.
    Writes and returns `out`, if there is one; returns `x` itself, if it has this dtype.
    """
    if x.dtype == dtype and out is None:
        return x
    x = _cut(x, dtype, share)
    return x.to(dtype) if out is None else out.copy_(x)


def saturate(x: Tensor, dtype: torch.dtype, share: float = 1.0) -> Tensor:
    """`x`, in its own dtype, cut off at the largest number of another; see :func:`narrow`."""
    return _cut(x, dtype, share).to(x.dtype)


def nan_unless_finite(x: Tensor) -> Tensor:
    """A scalar tensor: 0 if every element of `x` is finite, else NaN. One pass, no host sync."""
    if not x.numel():
        return torch.zeros((), dtype=x.dtype, device=x.device)
    lowest, highest = torch.aminmax(x)
    return lowest * 0 + highest * 0


def _cut(x: Tensor, dtype: torch.dtype, share: float) -> Tensor:
    """`x` cut off at the largest number of `dtype`, in float32 or wider; `x` itself if it fits."""
    largest = torch.finfo(dtype).max
    if largest >= torch.finfo(x.dtype).max or not x.numel():
        return x
    largest *= share
    if x.is_cpu:  # an accelerator is not asked: the host would have to wait
        least, most = torch.aminmax(x.detach())
        if -largest <= least.item() and most.item() <= largest:
            return x
    # bfloat16 does not know the largest float16: it would be rounded up.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide.clamp(-largest, largest).where(~wide.isinf(), wide)
