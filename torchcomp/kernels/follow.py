"""Follow: how long chosen elements of a residual wait to be sent, and what changes them.

In each step, :meth:`Follower.begin` reads the gradient, :meth:`Follower.add` what else enters the
residual, and :meth:`Follower.end` the residual before and after the step, and the mean.
"""

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

from torchcomp.kernels import backend

SAME = 0.01
"""Two values are the same up to this relative difference. The residual can have 16 bits."""


def follower(
    index: Tensor, numel: int, dtype: torch.dtype, others: Iterable[torch.dtype]
) -> "Follower":
    """Return what follows elements of a vector, in the fastest form.

    Args:
        index: 1-D int64, the elements.
        numel: of the vector.
        dtype: of the residual.
        others: of the gradient, the mean and what else enters the residual.
    """
    form = None
    if {dtype, *others} == {torch.float32}:
        form = backend.host_form("follow", index)
    kind: type[Follower] = Follower if form is None else form.Follower
    return kind(index, numel, dtype)


class Follower:
    """Follows elements of a vector, in plain torch.

    Args:
        index: 1-D int64, the elements.
        numel: of the vector, and of all that is read.
        dtype: of the residual.

    Attributes:
        ages: how many steps each element has waited; int32.
        earlier: the same before the last step.
        found: its residual before the last step.
        left: its residual after the last step.
        changed: whether a step has found another residual than the one before has left; bool.
    """

    def __init__(self, index: Tensor, numel: int, dtype: torch.dtype) -> None:
        count, device = index.numel(), index.device
        self._index, self._numel = index, numel
        self.ages = torch.zeros(count, dtype=torch.int32, device=device)
        self.earlier = torch.zeros_like(self.ages)
        # What the residual is after the step in flight if nothing is sent.
        self._unsent = torch.zeros(count, dtype=dtype, device=device)
        self.found, self.left = torch.zeros_like(self._unsent), torch.zeros_like(self._unsent)
        self.changed = torch.zeros(count, dtype=torch.bool, device=device)

    def begin(self, gradient: Tensor, factor: float) -> None:
        """Begin a step, whose gradient enters the residual with a factor."""
        self._unsent = self._read(gradient).to(self.left.dtype) * factor

    def add(self, values: Tensor, factor: float) -> None:
        """Add what else enters the residual, with a factor."""
        self._unsent.add_(self._read(values) * factor)

    def end(self, found: Tensor, factor: float, left: Tensor, mean: Tensor, same: bool) -> None:
        """End the step.

        Args:
            found: the residual before it.
            factor: the one with which this enters the residual after it.
            left: the residual after it.
            mean: what the step applies.
            same: whether `found` should be what the last step has left.
        """
        self.found, before = self._read(found), self.left
        self._unsent.add_(self.found * factor)
        self.left = self._read(left)
        if same:
            self.changed.logical_or_(self.found != before)
        # Not exactly 1, because of rounding. Without a residual, 0 / 0 is not above.
        is_sent = (self.left / self._unsent).sub_(1).abs_() > SAME
        is_sent.logical_and_(self._read(mean))
        # Without a residual, it still waits if it has before: in the server residual of any rank.
        waits = (self.left != 0).logical_or_(self.ages)
        self.earlier, self.ages = self.ages, (self.ages + waits).masked_fill_(is_sent, 0)

    def undo(self, mask: Tensor) -> None:
        """Forget the last step of some elements, given as bool: their residual is as before it."""
        self.ages.copy_(torch.where(mask, self.earlier, self.ages))
        self.left.copy_(torch.where(mask, self.found, self.left))

    def _read(self, values: Tensor) -> Tensor:
        return values.index_select(0, self._index)


@cache
def rehearse(device: torch.device) -> None:
    """Compile the kernels before training; see :func:`torchcomp.kernels.backend.attempt`."""

    def work() -> None:
        values = torch.zeros(1, device=device)
        tried = follower(values.long(), 1, values.dtype, ())
        tried.begin(values, 1.0)
        tried.add(values, 1.0)
        tried.end(values, 1.0, values, values, True)

    backend.attempt(work, device.type)
