"""Follow: how long chosen elements of a residual wait to be sent, and what changes them.

In each step, :meth:`Follower.begin` reads the gradient, :meth:`Follower.add` what else enters the
residual, and :meth:`Follower.end` the residual before and after the step, and the mean.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from torchcomp.kernels import backend

SAME = 0.01
"""Two values are the same up to this relative difference. The residual can have 16 bits."""

_FEWEST_STEPS, _MOST_STEPS, _VALUES = 10, 100, 2**16
"""Plain torch evaluates steps after this many values, but within these bounds: few elements would
otherwise keep thousands of steps."""


def follower(
    index: Tensor, numel: int, dtype: torch.dtype, others: Iterable[torch.dtype]
) -> "Follower":
    """Return what follows elements of a vector, in the fastest form.

    Args:
        index: 1-D int64, the elements.
        numel: of the vector, and of all that is read.
        dtype: of the residual.
        others: of the gradient, the mean and what else enters the residual.
    """
    if {dtype, *others} == {torch.float32}:
        form = backend.host_form("follow", index)
        if form is not None:
            fast: Follower = form.Follower(index, numel)
            return fast
    return Follower(index, dtype)


@dataclass(frozen=True)
class _Step:
    """What is read of the elements in one step.

    Attributes:
        parts: what the residual is after it if nothing is sent, in parts.
        factors: of the parts.
        found: the residual before it.
        left: the residual after it.
        mean: what it applies.
    """

    parts: tuple[Tensor, ...]
    factors: tuple[float, ...]
    found: Tensor
    left: Tensor
    mean: Tensor


class Follower:
    """Follows elements of a vector, in plain torch.

    Steps are read one by one and evaluated several at a time: on an accelerator, each operation is
    a launch that delays the backward pass.

    Args:
        index: 1-D int64, the elements.
        dtype: of the residual.
    """

    def __init__(self, index: Tensor, dtype: torch.dtype) -> None:
        count, device = index.numel(), index.device
        self._index = index
        self._most = min(_MOST_STEPS, max(_FEWEST_STEPS, _VALUES // max(1, count)))
        self._ages = torch.zeros(count, dtype=torch.int32, device=device)
        self._earlier = torch.zeros_like(self._ages)  # before the last step
        self._found = torch.zeros(count, dtype=dtype, device=device)  # before the last step
        self._left = torch.zeros_like(self._found)  # after the last step
        self._changed = torch.zeros(count, dtype=torch.bool, device=device)
        self._parts: list[tuple[Tensor, float]] = []  # of the step in flight
        self._steps: list[_Step] = []  # those that were read, but not evaluated
        self._same = False  # whether the first of them is compared with the step before it

    @property
    def left(self) -> Tensor:
        """The residual after the last step."""
        self._evaluate()
        return self._left

    def begin(self, gradient: Tensor, factor: float) -> None:
        """Begin a step. Its gradient, times a factor, is a part of the residual after it."""
        self._parts = [(self._read(gradient), factor)]

    def add(self, values: Tensor, factor: float) -> None:
        """Add another part of the residual after the step: values times a factor."""
        self._parts.append((self._read(values), factor))

    def end(self, found: Tensor, factor: float, left: Tensor, mean: Tensor, same: bool) -> None:
        """End the step.

        Args:
            found: the residual before it.
            factor: of `found` in the residual after it.
            left: the residual after it.
            mean: what the step applies.
            same: whether `found` should be what the last step has left.
        """
        before = self._read(found)
        parts, factors = zip(*self._parts, (before, factor), strict=True)
        step = _Step(parts, factors, before, self._read(left), self._read(mean))
        if self._steps and (not same or self._steps[-1].factors != factors):
            self._evaluate()
        if not self._steps:
            self._same = same
        self._steps.append(step)
        if len(self._steps) == self._most:
            self._evaluate()

    def take(self) -> tuple[Tensor, Tensor]:
        """Return what was found. The next call begins anew with what has changed.

        Returns:
            How many steps each element has waited (int32, valid until the next step), and whether a
            step has found another residual than the one before has left (bool).
        """
        self._evaluate()
        changed = self._changed.clone()
        self._changed.zero_()
        return self._ages, changed

    def undo(self, mask: Tensor) -> None:
        """Forget the last step of some elements, given as bool: their residual is as before it."""
        self._evaluate()
        self._ages.copy_(torch.where(mask, self._earlier, self._ages))
        self._left.copy_(torch.where(mask, self._found, self._left))

    def _read(self, values: Tensor) -> Tensor:
        return values.index_select(0, self._index)

    def _evaluate(self) -> None:
        """Evaluate the steps that were read."""
        if not self._steps:
            return
        steps, self._steps = self._steps, []
        found, left = (torch.stack([getattr(s, name) for s in steps]) for name in ("found", "left"))
        after, before = found[1:], left[:-1]
        if self._same:
            after, before = found, torch.cat([self._left[None], before])
        self._changed.logical_or_((after != before).any(0))
        self._found, self._left = found[-1].clone(), left[-1].clone()
        # Of 16 bits, the sum would have too few.
        wide = torch.promote_types(left.dtype, torch.float32)
        unsent = torch.zeros_like(left, dtype=wide)
        for i, factor in enumerate(steps[0].factors):
            unsent.add_(torch.stack([step.parts[i] for step in steps]).to(wide) * factor)
        # Not exactly 1, because of rounding. Without a residual, 0 / 0 is not above.
        is_sent = (left / unsent).sub_(1).abs_() > SAME
        is_sent.logical_and_(torch.stack([step.mean for step in steps]))
        waits = left != 0
        # The last step apart from the others: it can be undone.
        self._earlier = _aged(self._ages, waits[:-1], is_sent[:-1])
        self._ages = _aged(self._earlier, waits[-1:], is_sent[-1:])


def _aged(ages: Tensor, waits: Tensor, is_sent: Tensor) -> Tensor:
    """Return how long elements have waited after some steps.

    Args:
        ages: before these steps.
        waits: a row for each step: where there is a residual after it.
        is_sent: where it has sent it.
    """
    steps = len(waits)
    if not steps:
        return ages
    numbers = torch.arange(1, steps + 1, dtype=ages.dtype, device=ages.device)[:, None]
    last = (numbers * is_sent).amax(0)
    since = (waits.logical_and_(numbers > last) * (steps + 1 - numbers)).amax(0)
    # Without a residual, it still waits if it has before: in the server residual of any rank.
    return torch.where((ages > 0).logical_and_(last == 0), ages + steps, since)


@cache
def rehearse(device: torch.device) -> None:
    """Compile the kernels for a device; see :func:`torchcomp.kernels.backend.attempt`."""

    def work() -> None:
        values = torch.zeros(1, device=device)
        tried = follower(values.long(), 1, values.dtype, ())
        tried.begin(values, 1.0)
        tried.add(values, 1.0)
        tried.end(values, 1.0, values, values, True)

    backend.attempt(work, device.type)
