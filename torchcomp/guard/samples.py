"""Samples: a few elements of every parameter, followed from step to step."""

from collections.abc import Iterable, Mapping
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

_SAME = 0.01
"""Two values are the same up to this relative difference. The residual can have 16 bits."""


class Samples:
    """Follows how long the residual of sampled elements waits, and whether it stays as it was."""

    # These are no slots of the state: an error in a slot would be one in what checks it.
    def __init__(self) -> None:
        self._ratios: Mapping[str, float] = {}
        self._gradient = torch.empty(0)  # of the bucket in flight
        # Of each bucket: how many steps each element's residual has waited to be sent, and whether
        # it has changed between two steps since the last comparison.
        self._ages: dict[BucketShape, Tensor] = {}
        self._changed: dict[BucketShape, Tensor] = {}
        # The residual before and after the last step.
        self._residuals: dict[BucketShape, tuple[Tensor, Tensor]] = {}

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

        Args:
            bucket: the mean that the step applies.
            law: says what the residual would be if nothing was sent.
            before: the values before the step of the slots that it is made of.
            after: the residual after the step.
        """
        shape = bucket.shape
        at, _ = sample(shape, after.device)
        found = {name: values.index_select(0, at) for name, values in before.items()}
        left = after.index_select(0, at)
        unsent = self._gradient.to(left.dtype).mul_(law.gradient)
        for name, values in found.items():
            unsent.sub_(values, alpha=law.before[name])
        unsent.div_(law.after["error"])
        # Not exactly, because of rounding.
        is_sent = (left - unsent).abs_() > _SAME * unsent.abs_()
        is_sent.logical_and_(bucket.flat.index_select(0, at))
        age = self._ages.get(shape)
        if age is None:
            age = self._ages[shape] = torch.zeros(len(at), dtype=torch.int32, device=after.device)
        # Without a residual, it still waits if it has before: in the server residual of any rank.
        is_idle = (left == 0).logical_and_(age == 0)
        age.add_(1).masked_fill_(is_sent.logical_or_(is_idle), 0)
        last = self._residuals.get(shape)
        self._residuals[shape] = found["error"], left
        if last is not None:
            self._compare(shape, last[1], found["error"])

    def _compare(self, shape: BucketShape, left: Tensor, found: Tensor) -> None:
        """Compare the residual that the last step left with that which this step has found."""
        if self._ratios.keys().isdisjoint(shape.names):
            wrong = found != left
        else:
            _, owner = sample(shape, found.device)
            names, _ = filled(shape)
            ratios = torch.tensor([self._ratios.get(name, 1.0) for name in names])
            expected = left * host.copy_to(ratios, found.device)[owner]
            # Not rounded like the residual.
            wrong = (found - expected).abs() > _SAME * torch.maximum(found.abs(), expected.abs())
        if shape in self._changed:
            wrong.logical_or_(self._changed[shape])
        self._changed[shape] = wrong

    def take(self, shape: BucketShape) -> tuple[Tensor | None, Tensor | None]:
        """Return the age of each element in steps, and whether its residual has changed.

        Either is None if nothing is known of it. The next call begins anew with the second one.
        """
        return self._ages.get(shape), self._changed.pop(shape, None)

    def undo(self, names: Iterable[str]) -> None:
        """The step in flight is undone for these parameters: their residual stays as it was."""
        undone = set(names)
        for shape, (before, after) in self._residuals.items():
            chosen = [name in undone for name in filled(shape)[0]]
            if any(chosen):
                _, owner = sample(shape, after.device)
                mask = host.copy_to(torch.tensor(chosen), after.device)[owner]
                self._residuals[shape] = before, torch.where(mask, before, after)

    def forget(self) -> None:
        """Begin anew, because the next step does not continue the last one."""
        self._ages.clear()
        self._changed.clear()
        self._residuals.clear()


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
