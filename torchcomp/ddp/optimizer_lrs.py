"""OptimizerLRs: the learning rates at which optimizers train the parameters of a model."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchcomp.checkpoint import listed
from torchcomp.errors import SpecError

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


class OptimizerLRs:
    """Reads the learning rate of every parameter.

    Args:
        optimizers: the optimizers that train the parameters.
        parameters: the parameters by name.

    Raises:
        SpecError: if `optimizers` are not optimizers with a learning rate, or if a parameter is in
            none of them.
    """

    def __init__(self, optimizers: Optimizers, parameters: Mapping[str, Tensor]) -> None:
        # Any, because users also pass objects of other types, which the loop below reports.
        given: Any = optimizers
        self._optimizers = list(given) if isinstance(given, list | tuple) else [given]
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        for each in self._optimizers:
            if not isinstance(each, torch.optim.Optimizer):
                raise SpecError(
                    "lr_inside must be the torch.optim.Optimizer of the training loop, or a list "
                    f"of them, not {type(each).__name__}",
                    "lr_inside",
                )
            if any("lr" not in group for group in each.param_groups):
                raise SpecError(
                    f"lr_inside: {type(each).__name__} has a parameter group without a learning "
                    "rate ('lr'), which the residual would follow. Leave out lr_inside",
                    "lr_inside",
                )
        missing = sorted(set(parameters) - set(self.read()))
        if missing:
            raise SpecError(
                f"lr_inside: no optimizer trains {listed(missing)}, so the residual has no "
                "learning rate to follow there. Add the parameters to the optimizer, or freeze "
                "them before DistributedDataParallel(...)",
                "lr_inside",
            )

    def read(self) -> dict[str, float]:
        """Return the learning rates now, by parameter name."""
        lrs: dict[str, float] = {}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                # Once per group: of a tensor on a device, the host waits for the value.
                lr = float(group["lr"])
                held = (self._names.get(id(parameter)) for parameter in group["params"])
                lrs |= {name: lr for name in held if name is not None}
        return lrs
