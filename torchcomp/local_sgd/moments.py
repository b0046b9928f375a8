"""The optimizers' state at a synchronisation, with ``LocalSGD(moments="average")``."""

import zlib
from collections.abc import Mapping, Sequence
from numbers import Number

import torch
from torch import Tensor

from torchcomp.exchange import Exchange
from torchcomp.specs.errors import SpecError

CHOICES = ("local", "average", "reset")


def state_to_average(
    parameters: Mapping[str, Tensor], optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Tensor]:
    """Return the tensors of the optimizers' state, by parameter and key."""
    found = {}
    for index, optimizer in enumerate(optimizers):
        for name, parameter in parameters.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor | Number | str | None):
                    raise SpecError(
                        f"moments='average' cannot average the optimizer's state '{name} {key}', a "
                        f"{type(value).__name__}: use 'local' or 'reset'",
                        "moments",
                    )
                # Adam's bias correction needs the rank's own count of steps.
                if isinstance(value, Tensor) and value.is_floating_point() and key != "step":
                    found[f"{name} {key} (optimizer {index})"] = value
    return found


def with_missing(exchange: Exchange, mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add zeros for tensors that other ranks have: those of a parameter unused on this one."""
    tensors = dict(mine)
    layout = {name: (tensor.shape, tensor.dtype) for name, tensor in mine.items()}
    # Usually all ranks have the same ones, and comparing a checksum costs less than the names.
    if not exchange.same(zlib.crc32(repr(sorted(layout.items())).encode())):
        for theirs in exchange.gather_objects(layout):
            for name, (shape, dtype) in theirs.items():
                tensors.setdefault(name, torch.zeros(shape, dtype=dtype, device=exchange.device))
    return tensors
