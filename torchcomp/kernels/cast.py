"""Cast: rounding to a narrower dtype that saturates, and a test for NaN and infinities."""

import torch
from torch import Tensor


def narrow(x: Tensor, dtype: torch.dtype, out: Tensor | None = None, share: float = 1.0) -> Tensor:
    """`x` in another dtype; finite values beyond its range become its largest.

    With error feedback the residual keeps what is cut off. NaN and infinities stay what they are.

    Args:
        x: of any floating-point dtype.
        dtype: of the result.
        out: where it is written, of that dtype; by default a new tensor, or `x` itself if it has
            the dtype already.
        share: of the dtype's range, within which values stay.
    """
    if x.dtype == dtype and out is None:
        return x
    x = saturate(x, dtype, share)
    return x.to(dtype) if out is None else out.copy_(x)


def saturate(x: Tensor, dtype: torch.dtype, share: float = 1.0) -> Tensor:
    """`x`, in its own dtype, cut off at the largest number of another; see :func:`narrow`."""
    largest = torch.finfo(dtype).max
    if largest >= torch.finfo(x.dtype).max:
        return x
    largest *= share
    return torch.where(x.isinf(), x, x.clamp(-largest, largest))


def nan_unless_finite(x: Tensor) -> Tensor:
    """A scalar tensor: 0 if every element of `x` is finite, else NaN. One pass, no host sync."""
    if not x.numel():
        return torch.zeros((), dtype=x.dtype, device=x.device)
    lowest, highest = torch.aminmax(x)
    return lowest * 0 + highest * 0
