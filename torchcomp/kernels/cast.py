"""Casts to a narrower floating-point dtype that create no infinities, and a finiteness test."""

import torch
from torch import Tensor

from torchcomp.engine import host


def narrow(x: Tensor, dtype: torch.dtype, out: Tensor | None = None, share: float = 1.0) -> Tensor:
    """Convert `x` to `dtype`, clamping finite values to `share` of the range of `dtype`.

    NaN and infinities stay. Without `out`, `x` itself is returned if it already has this dtype.
    """
    # With error feedback, clamping loses nothing: the residual keeps the difference.
    if x.dtype == dtype and out is None:
        return x
    x = _cut(x, dtype, share)
    return x.to(dtype) if out is None else out.copy_(x)


def saturate(x: Tensor, dtype: torch.dtype, share: float = 1.0) -> Tensor:
    """Clamp `x` to the range of `dtype` but keep its own dtype; see :func:`narrow`."""
    return _cut(x, dtype, share).to(x.dtype)


def finite_if_all(x: Tensor) -> Tensor:
    """Return a scalar that is finite only if all elements of `x` are. The host does not wait."""
    if not x.numel():
        return torch.zeros((), dtype=x.dtype, device=x.device)
    if not x.is_cpu:  # on a CPU, a norm takes many times as long
        largest: Tensor = torch.linalg.vector_norm(x, torch.inf)
        return largest
    # The sum of both could overflow. Multiplied by 0, NaN and infinities give NaN.
    lowest, highest = torch.aminmax(x)
    return lowest * 0 + highest * 0


def nan_unless_finite(x: Tensor) -> Tensor:
    """Return a scalar tensor: 0 if every element of `x` is finite, otherwise NaN."""
    return finite_if_all(x) * 0


def _cut(x: Tensor, dtype: torch.dtype, share: float) -> Tensor:
    """Clamp `x` to the range of `dtype`, in float32 or wider. Return `x` itself if it fits."""
    largest = torch.finfo(dtype).max
    if largest >= torch.finfo(x.dtype).max or not x.numel():
        return x
    largest *= share
    # On a CPU, reading the range is cheaper than clamping. On an accelerator, `item()` would make
    # the host wait.
    if host.can_read(x):
        least, most = torch.aminmax(x.detach())
        if -largest <= least.item() and most.item() <= largest:
            return x
    # Clamp in float32: bfloat16 cannot represent the largest float16 and would round it up.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.where(wide.isinf(), wide, wide.clamp(-largest, largest))
