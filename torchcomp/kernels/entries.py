"""Entries: what a sparse message holds, taken out of a vector and added to it.

The fields of a message with k of n entries are those of its values, ascending in the index, and
then the Elias-Fano code of the indices. The values travel in a format of :mod:`.quantize`, or in a
dtype of their own as a single field.

On a CPU with Numba :mod:`.entries_numba` does the work; elsewhere, accelerators included, plain
torch does, with the same results.
"""

from collections.abc import Sequence
from itertools import chain
from types import ModuleType

import torch
from torch import Tensor

from torchcomp.kernels import elias_fano, quantize
from torchcomp.kernels.backend import numba_form
from torchcomp.wire import Parts

_FAST_DTYPES = (torch.float32, torch.float64)


def take(x: Tensor, index: Tensor) -> Tensor:
    """``x[index]``.

    Args:
        x: 1-D.
        index: 1-D int64, within bounds.

    Raises:
        IndexError: on a CPU, if the index is out of bounds.
    """
    return x.index_select(0, index)


def subtract(x: Tensor, index: Tensor, fields: Parts, fmt: str | None, weight: float = 1.0) -> None:
    """``x[index] -= weight * values``, the product rounded before, where values are finite.

    So a NaN or an infinity stays where it is, and a block that one of them has spoilt stays whole.

    Args:
        x: 1-D, floating-point.
        index: 1-D int64 of k elements, distinct and within bounds.
        fields: of k values.
        fmt: their format, one of quantize.FORMATS, or None for a dtype of their own.
        weight: factor on the values.

    Raises:
        ValueError: if the fields do not fit the format and the index.
        IndexError: on a CPU, if the index is out of bounds.
    """
    _check_values(fields, index.numel(), fmt)
    fast = _fast(x, index, *fields)
    if fast is None:
        values = _decoded(fields, index.numel(), fmt, x.dtype)
        values = torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
        x[index] = x[index].sub_(values * weight)
    else:
        fast.subtract(x, index, _plain(fields, index.numel(), fmt, x.dtype), weight)


def accumulate(
    messages: Sequence[Parts], k: int, fmt: str | None, out: Tensor, weight: float = 1.0
) -> None:
    """Add `weight` times each message to `out`, in their order.

    A message whose code of the indices is not intact, as no sender writes it, adds nothing but a
    NaN in ``out[0]``, which stops the step on all ranks.

    Args:
        messages: of each the fields of k values and the code of their indices, with any contents.
        k: entries of each message.
        fmt: format of the values, one of quantize.FORMATS, or None for a dtype of their own.
        out: 1-D of n elements, floating-point.
        weight: factor on the values.

    Raises:
        ValueError: if a message has not the fields of k of n entries; nothing is added then.
    """
    n, dtype = out.numel(), out.dtype
    for message in messages:
        _check_values(message[:-1], k, fmt)
        elias_fano.check_length(message[-1], n, k)
    fast = _fast(out, None, *chain(*messages)) if 0 < k < n else None
    if fast is not None and messages:
        plain = [
            (*_plain(message[:-1], k, fmt, dtype), message[-1].contiguous()) for message in messages
        ]
        if not fast.accumulate(plain, k, elias_fano.low_bits(n, k), out, weight):
            out[0] = torch.nan
        return
    for message in messages:
        values = _decoded(message[:-1], k, fmt, dtype)
        index, intact = elias_fano.decode(message[-1], n, k)
        # Adds zeros instead of asking whether it is intact: the host would have to wait for that.
        out.index_add_(0, index, values.where(intact, 0.0), alpha=weight)
        out[:1] = out[:1].where(intact, torch.nan)


def _check_values(fields: Parts, k: int, fmt: str | None) -> None:
    if fmt is not None:
        quantize.check_fields(fields, k, fmt)
    elif [field.numel() for field in fields] != [k]:
        raise ValueError(f"{k} values in a dtype of their own are one field of {k} elements")


def _plain(fields: Parts, k: int, fmt: str | None, dtype: torch.dtype) -> Parts:
    """Scales and codes as they are, values of other formats in this dtype; contiguous."""
    if fmt in quantize.LEVELS:
        return fields[0].contiguous(), fields[1].contiguous()
    return (_decoded(fields, k, fmt, dtype).contiguous(),)


def _decoded(fields: Parts, k: int, fmt: str | None, dtype: torch.dtype) -> Tensor:
    return fields[0].to(dtype) if fmt is None else quantize.decode(fields, k, fmt, dtype)


def _fast(x: Tensor, index: Tensor | None, *fields: Tensor) -> ModuleType | None:
    """The module that works on these faster than plain torch, if any."""
    if x.dtype not in _FAST_DTYPES or not x.is_contiguous():
        return None
    for tensor in (x, *fields) if index is None else (x, index, *fields):
        if not tensor.is_cpu:
            return None
    return numba_form("entries")
