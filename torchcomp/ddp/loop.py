"""What a handle reads of the training loop: the loss scale and the learning rates of each step."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from torchcomp.checkpoints.checkpoint import listed
from torchcomp.engine import host
from torchcomp.specs.errors import SpecError

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


class OptimizerLRs:
    """Reads the learning rate of every parameter, by name, from the optimizers that train them."""

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


class OfOneProcess:
    """Base of what hooks of a model refer to: all copies of the model share it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "OfOneProcess":
        return self

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a handle cannot be pickled, because it belongs to its process and process group. Save "
            "handle.state_dict() instead, and model.module.state_dict() for the model"
        )


class LossScale(OfOneProcess):
    """Reads the loss scale of each step from an enabled scaler.

    ``scaler.get_scale()`` waits until the device has done everything that was launched so far, in
    the thread that must launch the rest of the backward pass. Therefore :meth:`fetch` starts a copy
    to the host when a forward pass begins, and :meth:`read` waits for this copy only.
    """

    def __init__(self, scaler: "torch.amp.GradScaler", model: torch.nn.Module) -> None:
        self._scaler = scaler
        model.register_forward_pre_hook(self.fetch)
        # The scaler's tensor, its version when it was copied, and what waits for the copy.
        self._fetched: tuple[Tensor, int, Callable[[], Tensor]] | None = None

    # Compiled apart, because a compiled forward pass cannot start the copy.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def fetch(self, module: Any = None, args: Any = None) -> None:
        """In a forward pass: start a copy to the host, if the scale changed since the last one."""
        scale = self._scaler._get_scale_async()
        # The scaler has no tensor before the first loss. One on the CPU can be read at any time.
        if scale is None or host.can_read(scale) or self._is_fetched(scale):
            return
        self._fetched = scale, scale._version, host.copy_from(scale)

    def read(self) -> float:
        """Return the scale of the step in progress."""
        # If the loop updates the scale between a forward pass and its backward pass, the copy is
        # out of date.
        if self._fetched is None or not self._is_fetched(self._scaler._get_scale_async()):
            return float(self._scaler.get_scale())
        return float(self._fetched[2]())

    def _is_fetched(self, scale: Tensor | None) -> bool:
        # An update changes the tensor in place. The host sees only that its version changes.
        fetched, version = (None, 0) if self._fetched is None else self._fetched[:2]
        return scale is not None and fetched is scale and version == scale._version
