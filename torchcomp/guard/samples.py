"""Samples: a few elements of every parameter, followed from step to step."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from torchcomp import host
from torchcomp.bucket import Bucket, BucketShape
from torchcomp.keys import Key

_MOST = 256
"""Elements that are followed of a parameter, at most."""


class Samples:
    """Follows how long each element waits in the residual, and whether the residual stays so."""

    # These are no slots of the state: an error in a slot would be one in what checks it.
    def __init__(self) -> None:
        self._ratios: Mapping[str, float] = {}
        # Of each bucket: steps for which each element has waited in the residual, and whether its
        # residual has changed between two steps since the last comparison.
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

    def follow(self, bucket: Bucket, residual: tuple[Tensor, Tensor] | None) -> None:
        """Follow the elements of a bucket.

        Args:
            bucket: the mean that the step applies.
            residual: the residual before and after the step, if there is one.
        """
        shape, device = bucket.shape, bucket.flat.device
        if residual is None:
            return
        at, _ = sample(shape, device)
        last, age = self._residuals.get(shape), self._ages.get(shape)
        before, after = (values[at] for values in residual)
        if age is None:
            age = self._ages[shape] = torch.zeros(len(at), dtype=torch.int32, device=device)
        # An element without a gradient has nothing to wait for. One that waits does so until it is
        # applied: meanwhile, it can be in the server residual of another rank.
        age.add_((after != 0) | (age != 0)).mul_(bucket.flat[at] == 0)
        self._residuals[shape] = before, after
        if last is not None:
            self._compare(shape, last[1], before)

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
            wrong = (found - expected).abs() > 0.01 * torch.maximum(found.abs(), expected.abs())
        if shape in self._changed:
            wrong.logical_or_(self._changed[shape])
        self._changed[shape] = wrong

    def take(self, shape: BucketShape) -> tuple[Tensor | None, Tensor | None]:
        """Return for how many steps each element waits, and whether its residual has changed.

        None if nothing is known of it. What has changed is forgotten.
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
        drawn = torch.from_numpy(key.choice(size, min(size, _MOST), replace=False))
        at.append(drawn.sort().values + start)
        owner.append(torch.full((len(drawn),), i))
    return host.copy_to(torch.cat(at), device), host.copy_to(torch.cat(owner), device)
