"""Samples: a few elements of every parameter, followed from step to step."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from torchcomp import host
from torchcomp.aggregators import Law
from torchcomp.bucket import Bucket, BucketShape
from torchcomp.keys import Key

_MOST = 256
"""At most this many elements of a parameter are followed."""

_RUN = 8
"""They are runs of this many neighbours: reading one of them brings the others into the cache."""

_STEPS = 10
"""At most this many steps are evaluated at once."""

_SAME = 0.01
"""Two values are the same up to this relative difference. The residual can have 16 bits."""


@dataclass(frozen=True)
class _Step:
    """What is read of the sampled elements of a bucket in one step.

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


@dataclass
class _Followed:
    """What is known of the sampled elements of a bucket.

    Attributes:
        ages: how many steps the residual of each one has waited to be sent.
        law: the law of all `steps`.
        steps: those that were read, but not evaluated.
        last: the residual before and after the last step that was evaluated. None if the next step
            is not to be compared with it.
        changed: whether its residual has changed between two steps since the last comparison.
            None if no step was evaluated since then.
    """

    ages: Tensor
    law: Law
    steps: list[_Step] = field(default_factory=list)
    last: tuple[Tensor, Tensor] | None = None
    changed: Tensor | None = None

    def evaluate(self) -> None:
        """Evaluate the steps that were read."""
        if not self.steps:
            return
        steps, self.steps = self.steps, []
        found = {name: torch.stack([s.found[name] for s in steps]) for name in steps[0].found}
        left = torch.stack([step.left for step in steps])
        self._check(found["error"], left)
        # The last rows alone: views would keep all rows.
        self.last = steps[-1].found["error"], steps[-1].left
        gradient = torch.stack([step.gradient for step in steps]).to(left.dtype)
        factor = 1 / self.law.after["error"]
        unsent = gradient.mul_(self.law.gradient * factor)
        for name, values in found.items():
            unsent.sub_(values, alpha=self.law.before[name] * factor)
        # Not exactly 1, because of rounding. Without a residual, 0 / 0 is not above.
        is_sent = (left / unsent).sub_(1).abs_() > _SAME
        is_sent.logical_and_(torch.stack([step.mean for step in steps]))
        for waits, sent in zip(left != 0, is_sent, strict=True):
            # Without a residual, it still waits if it has before: in the server residual of any
            # rank.
            self.ages.add_(waits.logical_or_(self.ages)).masked_fill_(sent, 0)

    def _check(self, found: Tensor, left: Tensor) -> None:
        """Compare the residual that a step has found with that which the one before has left."""
        if self.last is None:
            found = found[1:]
            before = left[:-1]
        else:
            before = torch.cat([self.last[1][None], left[:-1]])
        self.note((found != before).any(0))

    def note(self, wrong: Tensor) -> None:
        """Note which residuals have changed between two steps."""
        self.changed = wrong if self.changed is None else self.changed.logical_or_(wrong)


class Samples:
    """Follows how long the residual of sampled elements waits, and whether it stays as it was."""

    # These are no slots of the state: an error in a slot would be one in what checks it.
    def __init__(self) -> None:
        self._ratios: Mapping[str, float] = {}
        self._gradient = torch.empty(0)  # of the bucket in flight
        self._followed: dict[BucketShape, _Followed] = {}

    def begin(self, ratios: Mapping[str, float]) -> None:
        """Begin a step.

        Args:
            ratios: by parameter name, what the residual was multiplied by since the last step.
        """
        self._ratios = ratios

    def before(self, bucket: Bucket) -> None:
        """Read the gradient of a bucket that is about to be averaged."""
        at, _ = sample(bucket.shape, bucket.flat.device)
        self._gradient = bucket.flat.index_select(0, at)

    def follow(
        self,
        bucket: Bucket,
        law: Law,
        before: Mapping[str, Tensor],
        after: Tensor,
    ) -> None:
        """Follow the elements of a bucket, of a method with a residual.

        Steps are read one by one and evaluated several at a time: that takes less than half of the
        time. A step in which the residual is scaled or undone is evaluated at once.

        Args:
            bucket: the mean that the step applies.
            law: says what the residual would be if nothing was sent.
            before: the values before the step of the slots that it is made of.
            after: the residual after the step.
        """
        at, _ = sample(bucket.shape, after.device)
        known = self._followed.get(bucket.shape)
        if known is None:
            ages = torch.zeros(len(at), dtype=torch.int32, device=after.device)
            known = self._followed[bucket.shape] = _Followed(ages, law)
        found = {name: values.index_select(0, at) for name, values in before.items()}
        step = _Step(
            self._gradient, found, after.index_select(0, at), bucket.flat.index_select(0, at)
        )
        if law is not known.law:  # laws are cached
            known.evaluate()
            known.law = law
        if not self._ratios.keys().isdisjoint(bucket.shape.names):
            known.evaluate()
            self._check_scaled(known, bucket.shape, found["error"])
        known.steps.append(step)
        if len(known.steps) == _STEPS:
            known.evaluate()

    def _check_scaled(self, known: _Followed, shape: BucketShape, found: Tensor) -> None:
        """Compare the residual that a step has found with the one before, times its ratio."""
        if known.last is None:
            return
        _, owner = sample(shape, found.device)
        names, _ = filled(shape)
        ratios = torch.tensor([self._ratios.get(name, 1.0) for name in names])
        expected = known.last[1] * host.copy_to(ratios, found.device)[owner]
        # Not rounded like the residual.
        known.note((found - expected).abs() > _SAME * torch.maximum(found.abs(), expected.abs()))
        known.last = None

    def take(self, shape: BucketShape) -> tuple[Tensor | None, Tensor | None]:
        """Return the age of each element in steps, and whether its residual has changed.

        Either is None if nothing is known of it. The next call begins anew with the second one.
        """
        known = self._followed.get(shape)
        if known is None:
            return None, None
        known.evaluate()
        changed, known.changed = known.changed, None
        return known.ages, changed

    def undo(self, names: Iterable[str]) -> None:
        """The step in flight is undone for these parameters: their residual stays as it was."""
        undone = set(names)
        for shape, known in self._followed.items():
            if undone.isdisjoint(shape.names):
                continue
            known.evaluate()
            if known.last is not None:
                before, after = known.last
                chosen = torch.tensor([name in undone for name in filled(shape)[0]])
                _, owner = sample(shape, after.device)
                mask = host.copy_to(chosen, after.device)[owner]
                known.last = before, torch.where(mask, before, after)

    def forget(self) -> None:
        """Begin anew, because the next step does not continue the last one."""
        self._followed.clear()


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
        if size > _MOST:
            runs = torch.from_numpy(key.choice(size // _RUN, _MOST // _RUN, replace=False))
            drawn = (runs.sort().values[:, None] * _RUN + torch.arange(_RUN)).flatten()
        at.append(drawn + start)
        owner.append(torch.full((len(drawn),), i))
    return host.copy_to(torch.cat(at), device), host.copy_to(torch.cat(owner), device)
