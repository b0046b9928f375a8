"""Entries: what a sparse message holds, taken out of a vector and added to it.

The fields of a message with k of n entries are those of its values, ascending in the index, in a
format of :mod:`.quantize`, and then the Elias-Fano code of the indices. They are as long as their
layout says: :func:`torchcomp.wire.unpack` has checked that where bytes came in.

On a CPU with Numba :mod:`.entries_numba` does the work; elsewhere, accelerators included, plain
torch does, with the same results.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from torchcomp.kernels import backend, elias_fano, quantize
from torchcomp.wire import Parts


def subtract(x: Tensor, index: Tensor, fields: Parts, weight: float = 1.0) -> None:
    """``x[index] -= weight * values``, the product rounded before, where values are finite.

    So a NaN or an infinity stays where it is, and a block that one of them has spoilt stays whole.

    Args:
        x: 1-D, floating-point.
        index: 1-D int64 of k elements, distinct and within bounds.
        fields: of k values.
        weight: factor on the values.
    """
    fast = _fast(x)
    if fast is not None:
        fast.subtract(x, index, _plain(fields, x.dtype), weight)
        return
    values = quantize.decode(fields, index.numel(), x.dtype)
    values = torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    x[index] = x[index].sub_(values * weight)


def accumulate(messages: Sequence[Parts], k: int, out: Tensor, weight: float = 1.0) -> None:
    """Add `weight` times each message to `out`, in their order.

    A message whose code of the indices is not intact, as no sender writes it, adds nothing but a
    NaN in ``out[0]``, which stops the step on all ranks.

    Args:
        messages: of each the fields of k values and the code of their indices, with any contents.
        k: entries of each message.
        out: 1-D of n elements, floating-point.
        weight: factor on the values.
    """
    n = out.numel()
    fast = _fast(out) if 0 < k < n and messages else None
    if fast is not None:
        plain = [(*_plain(fields, out.dtype), code.contiguous()) for *fields, code in messages]
        if not fast.accumulate(plain, k, elias_fano.low_bits(n, k), out, weight):
            out[0] = torch.nan
        return
    for *fields, code in messages:
        values = quantize.decode(fields, k, out.dtype)
        index, intact = elias_fano.decode(code, n, k)
        # Adds zeros instead of asking whether it is intact: the host would have to wait for that.
        out.index_add_(0, index, values.where(intact, 0.0), alpha=weight)
        out[:1] = out[:1].where(intact, torch.nan)


def _plain(fields: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """Scales and codes as they are, other values in this dtype; contiguous."""
    if len(fields) == 1:
        fields = [fields[0].to(dtype)]
    return [field.contiguous() for field in fields]


def _fast(x: Tensor) -> ModuleType | None:
    """The module that works on this vector faster than plain torch, if any."""
    if x.dtype not in (torch.float32, torch.float64) or not x.is_contiguous():
        return None
    return backend.fast_form("entries", x.device.type)
