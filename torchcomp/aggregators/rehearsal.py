"""Rehearse a method on a few numbers, before training."""

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

from torchcomp.aggregators.base import Aggregator
from torchcomp.engine.bucket import BucketShape
from torchcomp.engine.keys import Key
from torchcomp.engine.state import State
from torchcomp.exchange import InProcessExchange
from torchcomp.kernels import backend


def rehearse_all(method: Aggregator, parameters: Iterable[Tensor]) -> None:
    """Rehearse a method for the dtypes in which gradients or averaged weights are exchanged."""
    kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
    # Averages of weights are in float32 or wider.
    kinds |= {(torch.promote_types(dtype, torch.float32), device) for dtype, device in kinds}
    for dtype, device in kinds:
        rehearse(method.rehearsed, dtype, device)


@lru_cache(maxsize=256)
def rehearse(method: Aggregator, dtype: torch.dtype, device: torch.device) -> None:
    """Average a small bucket on one rank, to load and compile the kernels of the method."""
    # A matrix, because low-rank methods treat vectors differently. Large enough for topk(k=1000).
    shape = BucketShape(("weight",), ((256, 256),), dtype)

    def average() -> None:
        values = torch.linspace(-1, 1, shape.numel).to(device, dtype)
        bucket = method.prepared(shape, InProcessExchange.alone(device), State(), device)
        method.aggregate(values, bucket, Key(seed=0))

    backend.attempt(average, device.type)
