"""OptimizerLRs: the learning rates at which optimizers train the parameters of a model."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
            none of them or in several.
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
        held = Counter(name for name, _ in self._items())
        twice = [name for name, count in held.items() if count > 1]
        if twice:
            raise SpecError(
                f"lr_inside: several optimizers train {listed(twice)}, so the residual has several "
                "learning rates to follow there. Pass only the optimizer that takes the steps",
                "lr_inside",
            )
        missing = sorted(set(parameters) - set(held))
        if missing:
            raise SpecError(
                f"lr_inside: no optimizer trains {listed(missing)}, so the residual has no "
                "learning rate to follow there. Add the parameters to the optimizer, or freeze "
                "them before DistributedDataParallel(...)",
                "lr_inside",
            )

    def read(self) -> dict[str, Any]:
        """Return the learning rates now, by parameter name. They are not checked."""
        return dict(self._items())

    @property
    def unfit(self) -> list[str]:
        """Types of the optimizers that are not SGD without momentum.

        What they apply is not the learning rate of a step times its gradient.
        """
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
