"""The arguments of `register`, and what of them does not depend on the kind of model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchcomp.aggregators import Aggregator
from torchcomp.ddp.loop import OptimizerLRs, Optimizers
from torchcomp.ddp.managed import check_manager
from torchcomp.engine.averager import Averager
from torchcomp.engine.keys import check_seed
from torchcomp.specs.checks import check_choice, check_flag
from torchcomp.specs.component import Component
from torchcomp.specs.errors import SpecError

if TYPE_CHECKING:
    from torchcomp.guard import Guard


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keyword arguments of :func:`torchcomp.register`, which describes them."""

    seed: int = 0
    scaler: "torch.amp.GradScaler | None" = None
    check: str = "auto"
    lr_inside: Optimizers | None = None
    nodes: str | int | DeviceMesh | None = None
    inside: str | None = None
    replicate: DeviceMesh | None = None
    manager: Any = None
    guard: "Guard | bool" = False
    checksum: bool = False

    def compared(self, spec: str | Component) -> dict[str, Any]:
        """Return what must match on all ranks."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        del values["scaler"]
        for name in ("lr_inside", "replicate", "manager"):  # each rank has its own
            values[name] = "none" if values[name] is None else "set"
        if isinstance(self.nodes, DeviceMesh):
            values["nodes"] = "a DeviceMesh"
        return {"spec": spec, **values}

    def require_valid(self) -> None:
        """Require valid values that fit together."""
        check_seed(self.seed)
        check_scaler(self.scaler)
        if self.guard is not None and self.guard is not False:
            from torchcomp.guard import Guard

            Guard.of(self.guard)
        check_flag("checksum", self.checksum)
        check_choice("check", self.check, ("auto", "now", "late"))
        if self.inside is not None:
            check_choice("inside", self.inside, ("bf16",))
            if self.nodes is None:
                raise SpecError("inside is for the exchange inside a node: pass nodes", "inside")
        if self.manager is not None:
            check_manager(self.manager)
            if self.check == "late":
                raise late_does_not_fit("a manager, which decides on a step when it ends")
            for name in ("nodes", "replicate"):
                if getattr(self, name) is not None:
                    problem = "does not fit manager, whose ranks come and go. Leave one of them out"
                    raise SpecError(f"{name} {problem}", name)

    def late(self, device: torch.device) -> bool:
        """Return whether the host checks a step of gradients on `device` when the next begins."""
        if self.check == "auto":
            return device.type != "cpu" and self.manager is None
        return self.check == "late"

    def averager_of(self, aggregator: Aggregator, device: torch.device) -> Callable[..., Averager]:
        """Return what makes an averager of an exchange, parameters by name, and groups."""
        return partial(
            Averager,
            aggregator,
            seed=self.seed,
            late=self.late(device),
            checksum=self.checksum,
            takes_back=self.manager is None,
        )

    def lrs(self, parameters: Mapping[str, torch.Tensor]) -> OptimizerLRs | None:
        """Return the learning rates of the parameters, or None without `lr_inside`."""
        return None if self.lr_inside is None else OptimizerLRs(self.lr_inside, parameters)


def check_scaler(scaler: object) -> None:
    """Require a GradScaler, or None."""
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise SpecError(f"scaler must be a torch.amp.GradScaler, not {type(scaler).__name__}")


def late_does_not_fit(needs: str) -> SpecError:
    """Return the error for an option that needs the result of a step in the same step."""
    return SpecError(f"check='late' does not fit {needs}. Use check='now'", "check")
