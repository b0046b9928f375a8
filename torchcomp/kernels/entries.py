"""Entries of a sparse message: subtract them from a vector, or add them to it.

A message with k of n entries consists of these fields:

1. the values, in ascending order of their index, in a format of :mod:`.quantize`;
2. the Elias-Fano code of the indices.

The fields have the lengths of their layout: :func:`torchcomp.wire.unpack` checks received bytes.

On a CPU with Numba, :mod:`.entries_numba` runs. Everywhere else, accelerators included, plain torch
runs, with the same results.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from torchcomp.kernels import backend, elias_fano, quantize
from torchcomp.wire import Parts


def subtract(x: Tensor, index: Tensor, fields: Parts, weight: float = 1.0) -> None:
    """Compute ``x[index] -= weight * values`` in place, where the values are finite.

    Entries whose value is NaN or infinite keep their `x`. That includes every entry of a quantized
    block that a NaN or an infinity has made NaN.

    Args:
        x: 1-D, floating-point.
        index: 1-D int64 of k elements, distinct and within bounds.
        fields: the fields of k values.
        weight: factor on the values.
    """
    fast = _fast(x)
    if fast is not None:
        fast.subtract(x, index, _plain(fields, x.dtype), weight)
        return
    values = quantize.decode(fields, index.numel(), x.dtype)
    # Replace instead of masking: a boolean index would make the host wait for an accelerator.
    values = torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    # Not sub_(alpha=weight): it can fuse both operations, and the Numba form rounds the product.
    x[index] = x[index].sub_(values * weight)


def accumulate(messages: Sequence[Parts], k: int, out: Tensor, weight: float = 1.0) -> None:
    """Add `weight` times each message to `out`, in order.

    A message whose index code is damaged adds nothing. Instead it sets ``out[0]`` to NaN, which
    stops the step on all ranks.

    Args:
        messages: for each message, the fields of its k values and the code of its indices. The
            contents can be arbitrary bytes.
        k: number of entries of each message.
        out: 1-D, n elements, floating-point.
        weight: factor on the values.
    """
    n = out.numel()
    # With k = 0 or k = n the code has no bytes, and plain torch covers that case.
    fast = _fast(out) if 0 < k < n and messages else None
    if fast is not None:
        plain = [(*_plain(fields, out.dtype), code.contiguous()) for *fields, code in messages]
        if not fast.accumulate(plain, k, elias_fano.low_bits(n, k), out, weight):
            out[0] = torch.nan
        return
    for *fields, code in messages:
        values = quantize.decode(fields, k, out.dtype)
        index, intact = elias_fano.decode(code, n, k)
        # Add zeros instead of branching on `intact`: reading it would make the host wait.
        out.index_add_(0, index, values.where(intact, 0.0), alpha=weight)
        out[:1] = out[:1].where(intact, torch.nan)


def _plain(fields: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """Return the fields contiguous, with values that have no scales converted to `dtype`."""
    # One field means plain values. Two mean scales and codes, which the kernel decodes itself.
    if len(fields) == 1:
        fields = [fields[0].to(dtype)]
    return [field.contiguous() for field in fields]


def _fast(x: Tensor) -> ModuleType | None:
    """Return the module that handles this vector faster than plain torch, or None."""
    if x.dtype not in (torch.float32, torch.float64) or not x.is_contiguous():
        return None
    return backend.fast_form("entries", x.device.type)
