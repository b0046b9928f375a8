"""Optimizer state, averaged: ``moments="average"``, published beside Algorithm 2, as for SlowMo.

All floating-point tensors but step counts are averaged, in float32 or wider. A rank whose optimizer
holds nothing of a parameter (that it has not used, or whose steps a GradScaler has skipped so far)
adds zeros to the mean, and goes on without.
"""

import zlib
from collections.abc import Mapping, Sequence
from numbers import Number

import torch
from torch import Tensor

from torchcomp.averager import exact_mean
from torchcomp.errors import SpecError
from torchcomp.exchange import Exchange
from torchcomp.local_sgd.averages import UNCHANGED
from torchcomp.nonfinite import FiniteWatch


def state_to_average(
    parameters: Mapping[str, Tensor], optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Tensor]:
    """This rank's state of `parameters`; a SpecError names what cannot be averaged."""
    found = {}
    entries = {
        f"{name}{f' (optimizer {index})' if index else ''} {key}": value
        for index, optimizer in enumerate(optimizers)
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    for name, value in entries.items():
        if not isinstance(value, Tensor | Number | str | None):
            raise SpecError(
                f"moments='average' cannot average the optimizer's state '{name}', a "
                f"{type(value).__name__} and no tensor or number, and state that is averaged "
                "in part fits no rank: take moments='local' or 'reset'",
                "moments",
            )
        counts_steps = name.endswith(" step")
        if isinstance(value, Tensor) and value.is_floating_point() and not counts_steps:
            found[name] = value
    return found


def mean_state(exchange: Exchange, mine: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
    """The means of all that some rank holds; a NonFiniteError on all ranks if one is not finite."""
    device, tensors = exchange.device, dict(mine)
    layout = {name: (tensor.shape, tensor.dtype) for name, tensor in mine.items()}
    if not exchange.same(zlib.crc32(repr(sorted(layout.items())).encode())):
        for theirs in exchange.gather_objects(layout):
            for name, (shape, dtype) in theirs.items():
                if name not in tensors:
                    tensors[name] = torch.zeros(shape, dtype=dtype, device=device)
    means = exact_mean(exchange, dict(sorted(tensors.items())))
    finite = torch.ones((), dtype=torch.bool, device=device)
    for mean in means.values():
        finite &= mean.isfinite().all().to(device)
    where = f"the optimizers' state after step {step}"
    if not exchange.conclude(finite, where, UNCHANGED):
        raise FiniteWatch(exchange).error(where, UNCHANGED, sorted(tensors.items()))
    return means
