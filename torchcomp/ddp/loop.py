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
        given: Any = optimizers  # users pass objects of other types as well
        self._optimizers = list(given) if isinstance(given, list | tuple) else [given]
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        for each in self._optimizers:
            kind = type(each).__name__
            if not isinstance(each, torch.optim.Optimizer):
                raise SpecError(f"lr_inside takes optimizers of torch, not {kind}", "lr_inside")
            if any("lr" not in group for group in each.param_groups):
                raise SpecError(f"a parameter group of {kind} has no 'lr'", "lr_inside")
        held = Counter(name for name, _ in self._items())
        if wrong := [name for name in parameters if held[name] != 1]:
            problem = f"none or several optimizers of lr_inside train {listed(wrong)}"
            raise SpecError(f"{problem}: give each parameter one", "lr_inside")

    def read(self) -> dict[str, Any]:
        """Return the learning rates now, by parameter name. They are not checked."""
        return dict(self._items())

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

    ``scaler.get_scale()`` waits for the device in the thread that launches the backward pass. So
    `fetch` starts a copy in the forward pass, and `read` waits for this copy only.
    """

    def __init__(self, scaler: "torch.amp.GradScaler", model: torch.nn.Module) -> None:
        self._scaler = scaler
        model.register_forward_pre_hook(self.fetch)
        # The scaler's tensor, its version when it was copied, and what waits for the copy.
        self._fetched: tuple[Tensor | None, int, Callable[[], Any]] = None, 0, scaler.get_scale

    # Compiled apart, because a compiled forward pass cannot start the copy.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def fetch(self, module: Any = None, args: Any = None) -> None:
        """In a forward pass: start a copy to the host, if the scale changed since the last one."""
        scale = self._scaler._get_scale_async()
        # The scaler has no tensor before the first loss. One on the CPU can be read at any time.
        if scale is not None and not host.can_read(scale) and not self._is_fetched(scale):
            self._fetched = scale, scale._version, host.copy_from(scale)

    def read(self) -> float:
        """Return the scale of the step in progress."""
        # The loop may have updated the scale after the forward pass.
        fetched = self._is_fetched(self._scaler._get_scale_async())
        return float(self._fetched[2]() if fetched else self._scaler.get_scale())

    def _is_fetched(self, scale: Tensor | None) -> bool:
        # An update changes the tensor in place. The host sees only that its version changes.
        fetched, version, _ = self._fetched
        return scale is not None and fetched is scale and version == scale._version
