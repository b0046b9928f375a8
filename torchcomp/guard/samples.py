"""Samples: a few elements of every parameter, followed from step to step."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from torchcomp import host
from torchcomp.aggregators import Law
from torchcomp.bucket import BucketShape
from torchcomp.keys import Key

MOST = 128
"""At most this many elements of a parameter are followed."""

_RUN = 4
"""They are runs of this many neighbours: reading one of them brings the others into the cache."""

_FEWEST_STEPS, _MOST_STEPS, _VALUES = 10, 100, 2**16
"""Steps are evaluated after this many values, but within these bounds: a small bucket would
otherwise keep thousands of steps."""

_SAME = 0.01
"""Two values are the same up to this relative difference. The residual can have 16 bits."""


@dataclass(frozen=True)
class _Step:
    """What is read of the sampled elements in one step.

    Attributes:
        gradient: of this rank.
        found: the values before the step of the slots that the residual is made of.
        left: the residual after the step.
        mean: what the step applies.
    """

    gradient: Tensor
    found: dict[str, Tensor]
    left: Tensor
    mean: Tensor


class Samples:
    """Follows how long the residual of sampled elements waits, and whether it stays as it was.

    Steps are read one by one and evaluated several at a time: that takes less than half of the
    time. They are evaluated earlier before the residual is scaled, and before a step is undone.

    Args:
        shape: of the bucket.
        law: says what the residual would be if nothing was sent.
        device: of the bucket.
    """

    # These are no slots of the state: an error in a slot would be one in what checks it.
    def __init__(self, shape: BucketShape, law: Law, device: torch.device) -> None:
        self._at, self._owner = sample(shape, device)
        self._names, self._law = filled(shape)[0], law
        self._ages = torch.zeros(len(self._at), dtype=torch.int32, device=device)
        self._gradient = torch.empty(0)  # of the step in flight
        self._steps: list[_Step] = []  # those that were read, but not evaluated
        steps = _VALUES // max(1, len(self._at))
        self._together = min(_MOST_STEPS, max(_FEWEST_STEPS, steps))
        # The residual before and after the last step that was evaluated. None if the next step is
        # not to be compared with it.
        self._last: tuple[Tensor, Tensor] | None = None
        self._changed: Tensor | None = None
        self._earlier = self._ages  # before the last step that was evaluated: it can be undone

    def follow(self, law: Law) -> None:
        """Go on with another law of the same residual."""
        self._evaluate()
        self._law = law

    def before(self, gradient: Tensor) -> None:
        """Read the gradient of a bucket that is about to be averaged."""
        self._gradient = gradient.index_select(0, self._at)

    def after(
        self, mean: Tensor, found: Mapping[str, Tensor], left: Tensor, ratios: Mapping[str, float]
    ) -> None:
        """Read what the step has done.

        Args:
            mean: what it applies.
            found: the values before the step of the slots that the residual is made of.
            left: the residual after it.
            ratios: by parameter name, what the residual was multiplied by since the last step.
        """
        at = self._at
        read = {name: values.index_select(0, at) for name, values in found.items()}
        step = _Step(self._gradient, read, left.index_select(0, at), mean.index_select(0, at))
        if ratios and not ratios.keys().isdisjoint(self._names):
            self._evaluate()
            self._check_scaled(ratios, read["error"])
        self._steps.append(step)
        if len(self._steps) == self._together:
            self._evaluate()

    def _evaluate(self) -> None:
        """Evaluate the steps that were read."""
        if not self._steps:
            return
        steps, self._steps = self._steps, []
        law, factor = self._law, 1 / self._law.after["error"]
        found = {name: torch.stack([s.found[name] for s in steps]) for name in steps[0].found}
        left = torch.stack([step.left for step in steps])
        self._check(found["error"], left)
        self._last = steps[-1].found["error"], steps[-1].left
        unsent = torch.stack([step.gradient for step in steps]).to(left.dtype)
        unsent.mul_(law.gradient * factor)
        for name, values in found.items():
            unsent.sub_(values, alpha=law.before[name] * factor)
        # Not exactly 1, because of rounding. Without a residual, 0 / 0 is not above.
        is_sent = (left / unsent).sub_(1).abs_() > _SAME
        is_sent.logical_and_(torch.stack([step.mean for step in steps]))
        for waits, sent in zip(left != 0, is_sent, strict=True):
            # Without a residual, it still waits if it has before: in the server residual of any
            # rank.
            older = self._ages + waits.logical_or(self._ages)
            self._earlier, self._ages = self._ages, older.masked_fill_(sent, 0)

    def _check(self, found: Tensor, left: Tensor) -> None:
        """Compare the residual that a step has found with that which the one before has left."""
        if self._last is None:
            found, before = found[1:], left[:-1]
        else:
            before = torch.cat([self._last[1][None], left[:-1]])
        self._note((found != before).any(0))

    def _check_scaled(self, ratios: Mapping[str, float], found: Tensor) -> None:
        """Compare the residual that a step has found with the one before, times its ratio."""
        if self._last is None:
            return
        factors = torch.tensor([ratios.get(name, 1.0) for name in self._names])
        expected = self._last[1] * host.copy_to(factors, found.device)[self._owner]
        # Not rounded like the residual, whose dtype has no smaller numbers than `least`.
        numbers = torch.finfo(found.dtype)
        least = numbers.tiny * numbers.eps
        limit = torch.maximum(found.abs(), expected.abs()).mul_(_SAME).add_(least)
        self._note((found - expected).abs() > limit)
        self._last = None

    def _note(self, wrong: Tensor) -> None:
        """Note which residuals have changed between two steps."""
        self._changed = wrong if self._changed is None else self._changed.logical_or_(wrong)

    def take(self) -> tuple[Tensor, Tensor | None]:
        """Return the age of each element in steps, and whether its residual has changed.

        The second one is None if nothing is known of it. The next call begins anew with it.
        """
        self._evaluate()
        changed, self._changed = self._changed, None
        return self._ages, changed

    def undo(self, names: Iterable[str]) -> None:
        """The step in flight is undone for these parameters: their residual stays as it was."""
        undone = set(names)
        if undone.isdisjoint(self._names):
            return
        chosen = torch.tensor([name in undone for name in self._names])
        mask = host.copy_to(chosen, self._ages.device)[self._owner]
        self._evaluate()
        self._ages = torch.where(mask, self._earlier, self._ages)
        if self._last is not None:
            before, after = self._last
            self._last = before, torch.where(mask, before, after)


@lru_cache(maxsize=1024)
def filled(shape: BucketShape) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the names and sizes of the parameters with any elements."""
    found = [each for each in zip(shape.names, shape.sizes, strict=True) if each[1]]
    return tuple(name for name, _ in found), tuple(size for _, size in found)


@lru_cache(maxsize=1024)
def sample(shape: BucketShape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the sampled elements of a bucket, and the position of each one's name in `filled`."""
    names, sizes = filled(shape)
    at, owner = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
    starts = accumulate(sizes, initial=0)
    for i, (name, size, start) in enumerate(zip(names, sizes, starts, strict=False)):
        # By name alone, so that all ranks and all buckets follow the same elements.
        key = Key(0).of_tensor(name).shared()
        drawn = torch.arange(size)
        if size > MOST:
            runs = torch.from_numpy(key.choice(size // _RUN, MOST // _RUN, replace=False))
            drawn = (runs.sort().values[:, None] * _RUN + torch.arange(_RUN)).flatten()
        at.append(drawn + start)
        owner.append(torch.full((len(drawn),), i))
    return host.copy_to(torch.cat(at), device), host.copy_to(torch.cat(owner), device)
