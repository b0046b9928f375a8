"""Averages of the optimizers' state (``moments="average"``) and of BatchNorm's statistics.

Averaging the optimizers' state is an option in the paper of Algorithm 2 and in SlowMo. All
floating-point tensors except step counts are averaged, in float32 or wider. An optimizer has no
state for a parameter that the rank has not used, or if a GradScaler has skipped every step so far.
Such a rank adds zeros to the mean and continues without state.
"""

import zlib
from collections.abc import Mapping, Sequence
from numbers import Number

import torch
from torch import Tensor

from torchcomp.engine.means import exact_mean
from torchcomp.engine.nonfinite import all_finite
from torchcomp.exchange import Exchange
from torchcomp.local_sgd.averages import require_finite
from torchcomp.specs.errors import SpecError


def state_to_average(
    parameters: Mapping[str, Tensor], optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Tensor]:
    """The tensors to average of the optimizers' state for `parameters`, by name and key.

    Raises:
        SpecError: if the state contains something that cannot be averaged, naming it.
    """
    found = {}
    for index, optimizer in enumerate(optimizers):
        # Two optimizers can train the same parameter.
        suffix = f" (optimizer {index})" if index else ""
        for name, parameter in parameters.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor | Number | str | None):
                    raise SpecError(
                        f"moments='average' cannot average the optimizer's state '{name} {key}': "
                        f"it is a {type(value).__name__}, not a tensor or number. Use "
                        "moments='local' or 'reset'",
                        "moments",
                    )
                # Adam's bias correction needs the rank's own count of steps.
                if isinstance(value, Tensor) and value.is_floating_point() and key != "step":
                    found[f"{name}{suffix} {key}"] = value
    return found


def mean_state(exchange: Exchange, mine: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
    """The mean over the ranks of every tensor that at least one rank has.

    Raises:
        NonFiniteError: on every rank, if a mean is not finite.
    """
    tensors, device = dict(mine), exchange.device
    layout = {name: (tensor.shape, tensor.dtype) for name, tensor in mine.items()}
    # Compare a checksum first: usually all ranks have the same tensors, and gathering the names of
    # all of them costs more than one small collective.
    if not exchange.same(zlib.crc32(repr(sorted(layout.items())).encode())):
        for theirs in exchange.gather_objects(layout):
            for name, (shape, dtype) in theirs.items():
                tensors.setdefault(name, torch.zeros(shape, dtype=dtype, device=device))
    # Sorted, because the order in which an optimizer creates state can differ between ranks.
    means = exact_mean(exchange, dict(sorted(tensors.items())))
    where = f"the averages of optimizer state or BatchNorm statistics after step {step}"
    require_finite(exchange, all_finite(means.values(), device), where, tensors)
    return means
