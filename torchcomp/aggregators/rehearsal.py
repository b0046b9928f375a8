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


# Cached, because simulations create many averagers with the same method.
@lru_cache(maxsize=256)
def rehearse(method: Aggregator, dtype: torch.dtype, device: torch.device) -> None:
    """Average a small bucket on one rank, to load and compile the kernels of the method."""

    def average() -> None:
        # A matrix, because low-rank methods treat vectors differently. Large enough for
        # topk(k=1000), which sends a smaller vector whole.
        shape = BucketShape(("weight",), ((256, 256),), dtype)
        values = torch.linspace(-1, 1, shape.numel).to(device, dtype)
        exchange = InProcessExchange.alone(device)
        method.aggregate(values, method.prepared(shape, exchange, State(), device), Key(seed=0))

    backend.attempt(average, device.type)
