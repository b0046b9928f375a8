"""OptimizerLRs: the learning rates at which optimizers train the parameters of a model."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchcomp.checkpoints.checkpoint import listed
from torchcomp.specs.errors import SpecError

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


class OptimizerLRs:
    """Reads the learning rate of every parameter, by name, from the optimizers that train them.

    Raises:
        SpecError: if `optimizers` are not optimizers with a learning rate, or if a parameter is in
            none of them or in several.
    """

    def __init__(self, optimizers: Optimizers, parameters: Mapping[str, Tensor]) -> None:
        # Any, because users also pass objects of other types, which the loop below reports.
        given: Any = optimizers
        self._optimizers = list(given) if isinstance(given, list | tuple) else [given]
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        problem = self._problem(parameters)
        if problem is not None:
            raise SpecError(f"lr_inside {problem}", "lr_inside")

    def _problem(self, parameters: Mapping[str, Tensor]) -> str | None:
        for each in self._optimizers:
            if not isinstance(each, torch.optim.Optimizer):
                return (
                    "must be the torch.optim.Optimizer of the training loop, or a list of them, "
                    f"not {type(each).__name__}"
                )
            if any("lr" not in group for group in each.param_groups):
                return (
                    f"needs a learning rate ('lr') in each parameter group, for the residual to "
                    f"follow, and {type(each).__name__} has a group without. Leave out lr_inside"
                )
        held = Counter(name for name, _ in self._items())
        if twice := [name for name, count in held.items() if count > 1]:
            return (
                f"needs one optimizer for each parameter, and several train {listed(twice)}. Pass "
                "only the optimizer that takes the steps"
            )
        if missing := sorted(set(parameters) - set(held)):
            return (
                f"needs an optimizer for each parameter, and none trains {listed(missing)}. Add "
                "the parameters to it, or freeze them before DistributedDataParallel(...)"
            )
        return None

    def read(self) -> dict[str, Any]:
        """Return the learning rates now, by parameter name. They are not checked."""
        return dict(self._items())

    @property
    def unfit(self) -> list[str]:
        """Types of the optimizers that do not apply the learning rate times the gradient."""
        # By the options of SGD, because wrappers such as ZeroRedundancyOptimizer are no SGD.
        return [
            type(each).__name__
            for each in self._optimizers
            if any("dampening" not in group or group["momentum"] for group in each.param_groups)
        ]

    def _items(self) -> Iterator[tuple[str, Any]]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                # Once per group: of a tensor on a device, the host waits for the value.
                lr = float(group["lr"]) if isinstance(group["lr"], Tensor) else group["lr"]
                for parameter in group["params"]:
                    name = self._names.get(id(parameter))
                    if name is not None:
                        yield name, lr
