"""Prepared: what a bucket needs in every step of one method, made once."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torchcomp.bucket import BucketShape
from torchcomp.exchange import Exchange
from torchcomp.state import Slot, State


class Prepared:
    """A bucket of one shape, prepared for one method, exchange and device.

    It is made again whenever one of them changes. A step only reads it, except for workspaces,
    which never change a result.

    Attributes:
        shape: the bucket.
        exchange: the ranks that average it.
        state: stores the slots.
        device: device of the gradients.
        route: how its messages travel, if the method has a route.
        work: anything else that the method has prepared.
        shows_nonfinite: whether the residual shows which gradients of this rank were not finite.
            Gradients are then not checked before the exchange.
    """

    def __init__(
        self,
        shape: BucketShape,
        exchange: Exchange,
        state: State,
        device: torch.device,
        slots: Iterable[Slot] = (),
    ) -> None:
        self.shape, self.exchange, self.state, self.device = shape, exchange, state, device
        self.slots = {slot.name: slot for slot in slots}
        self.route: Any = None
        self.work: Any = None
        self.shows_nonfinite = False

    def open(self, slot: str) -> tuple[Tensor, Tensor]:
        """Return the values of a slot before this step, and a tensor for those after it.

        Both are 1-D. Write every element of the second, and none of the first.
        """
        return self.state.open(self.slots[slot], self.device)
