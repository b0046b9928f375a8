"""Cast: to a floating-point dtype of less range, without making infinities."""

import torch
from torch import Tensor


def narrow(x: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """`x` in another dtype; finite values beyond its range become its largest, of the same sign.

    NaN and infinities stay. Where the range of `dtype` is at least that of `x`, this is
    ``x.to(dtype)`` and nothing else.

    Args:
        x: floating-point, of any shape.
        dtype: floating-point.
        out: like `x`, of this dtype; written instead of a new tensor.

    Returns:
        `out`, if there is one; `x` itself, if it has this dtype; a new tensor otherwise.
    """
    if x.dtype == dtype and out is None:
        return x
    largest = torch.finfo(dtype).max
    if largest < torch.finfo(x.dtype).max and not _fits(x, largest):
        # bfloat16 does not know the largest float16: it would be rounded up.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        x = wide.clamp(-largest, largest).where(~wide.isinf(), wide)
    return x.to(dtype) if out is None else out.copy_(x)


def _fits(x: Tensor, largest: float) -> bool:
    """Whether nothing in `x` needs care. An accelerator is not asked: the host would wait."""
    if x.device.type != "cpu" or not x.numel():
        return not x.numel()
    least, most = torch.aminmax(x.detach())
    return -largest <= least.item() and most.item() <= largest
