"""Entries of a sparse message: subtract them from a vector, or add them to it.

A message with k of n entries consists of these fields:

1. the values, in ascending order of their index, in a format of :mod:`.quantize`;
2. the Elias-Fano code of the indices.

The fields have the lengths of their layout: :func:`torchcomp.routes.wire.unpack` checks received
bytes.

This is plain torch. On a CPU with Numba, :mod:`.entries_numba` runs, and on CUDA with Triton the
kernels of :mod:`.sparse_triton`, with the same results.
"""

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from torchcomp.kernels import elias_fano, quantize
from torchcomp.kernels.segments import TOGETHER, Segment, batches, joined, runs, split
from torchcomp.routes.wire import Parts


def subtract(
    x: Tensor,
    index: Tensor,
    message: Sequence[Parts],
    segments: Sequence[Segment],
    weight: float = 1.0,
) -> None:
    """Compute ``x[index] -= weight * values`` in place, where the values are finite.

    Entries whose value is NaN or infinite keep their `x`. That includes every entry of a quantized
    block that a NaN or an infinity has made NaN.

    Args:
        x: 1-D, floating-point.
        index: 1-D int64, distinct and within bounds: the entries of all segments.
        message: the fields of each segment.
        segments: parts of `x`.
        weight: factor on the values.
    """
    counts = [segment.k for segment in segments]
    values = joined(quantize.decode([parts[:-1] for parts in message], counts, x.dtype))
    # Replace instead of masking: a boolean index would make the host wait for an accelerator.
    values = torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    # Not alpha=-weight: it can fuse both operations, and the Numba form rounds the product.
    x.index_add_(0, index, values if weight == 1 else values * weight, alpha=-1)


def accumulate(
    messages: Sequence[Sequence[Parts]],
    segments: Sequence[Segment],
    out: Tensor,
    weight: float = 1.0,
) -> None:
    """Add `weight` times each message to `out`, in order.

    If the index code of a message is damaged, all of `out` becomes NaN, which stops the step on all
    ranks: each looks at a part of it.

    Args:
        messages: for each message the fields of each segment. The contents can be arbitrary bytes.
        segments: parts of `out`. They overlap if they are those of several messages in one.
        out: 1-D, floating-point.
        weight: factor on the values.
    """
    cuts = runs(segments)
    each = [(segments[cut], message[cut]) for message in messages for cut in cuts]
    sizes = [sum(segment.k for segment in some) for some, _ in each]
    # As many at once as memory allows: each launch on an accelerator delays the backward pass.
    for batch in batches(sizes, TOGETHER):
        every = [segment for some, _ in each[batch] for segment in some]
        parts = [own for _, message in each[batch] for own in message]
        counts = [segment.k for segment in every]
        values = iter(quantize.decode([fields for *fields, _ in parts], counts, out.dtype))
        index, damaged = elias_fano.decode([code for *_, code in parts], every)
        for at, (some, _) in zip(split(index, sizes[batch]), each[batch], strict=True):
            out.index_add_(0, at, joined(list(islice(values, len(some)))), alpha=weight)
        # Reading `damaged` would make the host wait.
        out.masked_fill_(damaged, torch.nan)
