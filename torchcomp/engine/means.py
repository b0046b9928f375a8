"""Exact means over the ranks."""

from collections.abc import Mapping

import torch
from torch import Tensor

from torchcomp.engine.bucket import Bucket, BucketShape, merge
from torchcomp.exchange import Exchange


def average_in_place(exchange: Exchange, values: Tensor) -> None:
    """Replace `values` (1-D, contiguous) with their exact mean over the ranks."""
    exchange.all_reduce(values)
    # Divide last. Gradients are multiplied by the reciprocal before the sum, as in plain DDP. It is
    # rounded, always to the same side: weights that are averaged thousands of times would drift.
    values.div_(exchange.world_size)


@torch.no_grad()
def exact_mean(exchange: Exchange, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the means of tensors over the ranks, as new tensors in float32 or wider."""
    means: dict[str, Tensor] = {}
    for group in merge(((name,) for name in tensors), tensors):
        bucket = Bucket.read(BucketShape.of(group, tensors).wide(), tensors)
        average_in_place(exchange, bucket.flat)
        means |= bucket.tensors()
    return means
