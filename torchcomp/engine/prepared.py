"""Prepared: what a bucket needs in every step of one method, made once."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchcomp.engine.bucket import BucketShape
from torchcomp.engine.state import Slot, State
from torchcomp.exchange import Exchange
from torchcomp.kernels.cast import narrow


@dataclass(eq=False)
class Prepared:
    """A bucket of one shape, prepared for one method, exchange and device.

    A step only reads it, except for workspaces, which never change a result.
    """

    shape: BucketShape
    exchange: Exchange
    state: State
    device: torch.device
    slots: dict[str, Slot]
    # Whether the residual shows which gradients of this rank were not finite. They are then not
    # checked before the exchange.
    shows_nonfinite: bool
    route: Any = None  # how its messages travel, if the method has a route
    work: Any = None  # what else the method has prepared

    def open(self, slot: str) -> tuple[Tensor, Tensor]:
        """Return the values of a slot before this step, and a tensor for those after it.

        Both are 1-D. Write every element of the second, and none of the first.
        """
        return self.state.open(self.slots[slot], self.device)

    def write_mean(self, g: Tensor, e: Tensor) -> None:
        """Write the route's mean to the gradients `g`, and add what rounding loses to `e`."""
        wide = torch.promote_types(g.dtype, e.dtype)
        if wide == g.dtype:
            # Nothing is rounded here, so the mean needs no tensor of its own.
            self.route.mean(g)
            return
        mean = torch.empty_like(g, dtype=wide)
        self.route.mean(mean)
        write_rounded(mean, g, e)


def write_rounded(mean: Tensor, g: Tensor, e: Tensor) -> None:
    """Write a mean to `g`, and add what rounding to its dtype loses to `e`."""
    narrow(mean, g.dtype, g)
    if g.dtype != mean.dtype:
        # Every rank adds the same error, so the mean residual contains it exactly once.
        e.add_(mean.sub_(g))
