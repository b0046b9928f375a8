"""Entries of a sparse message: subtract them from a vector, or add them to it.

A message with k of n entries consists of these fields:

1. the values, in ascending order of their index, in a format of :mod:`.quantize`;
2. the Elias-Fano code of the indices.

The fields have the lengths of their layout: :func:`torchcomp.wire.unpack` checks received bytes.

On a CPU with Numba, :mod:`.entries_numba` runs. On CUDA with Triton, :mod:`.entries_triton` runs,
and everywhere else plain torch, with the same results.
"""

from collections.abc import Sequence
from itertools import islice
from types import ModuleType

import torch
from torch import Tensor

from torchcomp.kernels import backend, elias_fano, quantize
from torchcomp.kernels.segments import TOGETHER, Segment, batches, joined, rows, split
from torchcomp.wire import Parts

Batch = tuple[Sequence[Segment], Sequence[Parts]]
"""A message: segments of a vector, and the fields of each."""


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
    else:
        subtract_all(x, index, [fields], [index.numel()], weight)


def subtract_all(
    x: Tensor, index: Tensor, messages: Sequence[Parts], counts: Sequence[int], weight: float
) -> None:
    """Subtract the values of several messages at once; see :func:`subtract`.

    Args:
        x: 1-D, floating-point.
        index: 1-D int64, distinct and within bounds: the entries of all messages.
        messages: the fields of the values of each message.
        counts: number of values of each message.
        weight: factor on the values.
    """
    values, form = joined(quantize.decode_all(messages, counts, x.dtype)), _on_device(x)
    if form is not None:
        form.subtract(x, index, values, weight)
        return
    # Replace instead of masking: a boolean index would make the host wait for an accelerator.
    values = torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    # Not alpha=-weight: it can fuse both operations, and the Numba form rounds the product.
    x.index_add_(0, index, values if weight == 1 else values * weight, alpha=-1)


def accumulate(messages: Sequence[Parts], k: int, out: Tensor, weight: float = 1.0) -> None:
    """Add `weight` times each message to `out`, in order.

    If the index code of a message is damaged, ``out[0]`` becomes NaN, which stops the step on all
    ranks. What happens to the other entries is not specified.

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
            out[:1].fill_(torch.nan)
    else:
        accumulate_all([([Segment(0, n, k)], [message]) for message in messages], out, weight)


def accumulate_all(messages: Sequence[Batch], out: Tensor, weight: float) -> None:
    """Add messages in order; see :func:`accumulate`.

    Args:
        messages: for each message, disjoint segments of `out`, and for each segment the fields of
            its values and the code of its indices.
        out: 1-D, floating-point.
        weight: factor on the values.
    """
    sizes = [sum(segment.k for segment in each) for each, _ in messages]
    for run in batches(sizes, TOGETHER):
        some = messages[run]
        segments = [segment for each, _ in some for segment in each]
        parts = [part for _, each in some for part in each]
        if not segments:
            continue
        counts = [segment.k for segment in segments]
        values = quantize.decode_all([fields for *fields, _ in parts], counts, out.dtype)
        index, damaged = elias_fano.decode_all([code for *_, code in parts], segments)
        sizes = [sum(segment.k for segment in each) for each, _ in some]
        form = _on_device(out)
        if form is not None and len(set(sizes)) == 1:
            alone = len(values) == len(some)
            matrix = rows(values) if alone else joined(values).view(len(some), -1)
            form.accumulate(out, index.view(matrix.shape), matrix, damaged, weight)
            continue
        rest = iter(values)
        for at, (each, _) in zip(split(index, sizes), some, strict=True):
            out.index_add_(0, at, joined(list(islice(rest, len(each)))), alpha=weight)
        # Reading `damaged` would make the host wait.
        out[:1].masked_fill_(damaged, torch.nan)


def _plain(fields: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """Return the fields contiguous, with values that have no scales converted to `dtype`."""
    # One field means plain values. Two mean scales and codes, which the kernel decodes itself.
    if len(fields) == 1:
        fields = [fields[0].to(dtype)]
    return [field.contiguous() for field in fields]


def _fast(x: Tensor) -> ModuleType | None:
    """Return the module that handles a vector of the host faster than plain torch, or None."""
    if x.dtype not in (torch.float32, torch.float64) or not x.is_contiguous():
        return None
    return backend.host_form("entries", x)


def _on_device(x: Tensor) -> ModuleType | None:
    """Return the module that handles this vector faster than plain torch on an accelerator."""
    form = backend.device_form("entries", x)
    if form is None or x.dtype not in form.DTYPES or x.numel() >= form.LIMIT:
        return None
    return form if x.is_contiguous() else None
