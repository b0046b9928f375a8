"""Rehearse a method on a few numbers, before training."""

from functools import lru_cache

import torch

from torchcomp.aggregators.base import Aggregator
from torchcomp.bucket import Bucket, BucketShape
from torchcomp.exchange import InProcessExchange
from torchcomp.kernels import backend
from torchcomp.keys import Key
from torchcomp.state import State


# Cached, because simulations create many averagers with the same method.
@lru_cache(maxsize=256)
def rehearse(method: Aggregator, dtype: torch.dtype, device: torch.device) -> None:
    """Average a small bucket on one rank, to load and compile the kernels of the method.

    If a kernel of Numba or Triton fails, all kernels on this type of device run in plain torch from
    now on, and one warning is logged. Results are the same bit for bit.

    Args:
        method: the method that will run.
        dtype: dtype of the gradients.
        device: device of the gradients.
    """
    method = method.rehearsed
    try:
        _average(method, dtype, device)
    except Exception as error:  # a compiler can raise any type of exception
        if not backend.without_fast_forms(device.type, f"{type(error).__name__}: {error}"):
            raise
        _average(method, dtype, device)


def _average(method: Aggregator, dtype: torch.dtype, device: torch.device) -> None:
    # A matrix, because low-rank methods treat vectors differently.
    shape = BucketShape(("weight",), ((16, 16),), dtype)
    values = torch.linspace(-1, 1, shape.numel).to(device, dtype)
    exchange = InProcessExchange.alone(device)
    method.aggregate(Bucket(shape, values), exchange, State(), Key(seed=0))
