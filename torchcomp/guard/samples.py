"""Samples: a few elements of every parameter, followed from step to step."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from torchcomp import host
from torchcomp.aggregators import Law
from torchcomp.bucket import BucketShape
from torchcomp.kernels.follow import SAME, follower
from torchcomp.keys import Key

MOST = 128
"""At most this many elements of a parameter are followed."""

_RUN = 4
"""They are runs of this many neighbours: reading one of them brings the others into the cache."""


class Samples:
    """Follows how long the residual of sampled elements waits, and whether it stays as it was.

    Args:
        shape: of the bucket.
        law: says what the residual would be if nothing was sent.
        dtypes: of the slots that enter the residual, by name.
        device: of the bucket.

    Attributes:
        dtypes: the argument.
    """

    # These are no slots of the state: an error in a slot would be one in what checks it.
    def __init__(
        self,
        shape: BucketShape,
        law: Law,
        dtypes: Mapping[str, torch.dtype],
        device: torch.device,
    ) -> None:
        self._at, self._owner = sample(shape, device)
        self._names = filled(shape)[0]
        self.dtypes = dict(dtypes)
        others = shape.dtype, *dtypes.values()
        self._follower = follower(self._at, shape.numel, dtypes["error"], others)
        # Whether the next step continues the last one, and the residual should be the same.
        self._continues = False
        # Where a residual that was to be multiplied was not.
        self._scaled_otherwise = torch.zeros(len(self._at), dtype=torch.bool, device=device)
        self.follow(law)

    def follow(self, law: Law) -> None:
        """Go on with another law of the same residual."""
        factor = 1 / law.after["error"]
        self._of_gradient = law.gradient * factor
        self._of_slots = {name: -before * factor for name, before in law.before.items()}

    def before(self, gradient: Tensor) -> None:
        """Read the gradient of a bucket that is about to be averaged."""
        self._follower.begin(gradient, self._of_gradient)

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
        if ratios and not ratios.keys().isdisjoint(self._names):
            self._check_scaled(ratios, found["error"])
        for name, values in found.items():
            if name != "error":
                self._follower.add(values, self._of_slots[name])
        factor = self._of_slots["error"]
        self._follower.end(found["error"], factor, left, mean, self._continues)
        self._continues = True

    def _check_scaled(self, ratios: Mapping[str, float], residual: Tensor) -> None:
        """Compare the residual that a step has found with the one before, times its ratio."""
        if not self._continues:
            return
        self._continues = False
        found = residual.index_select(0, self._at)
        factors = torch.tensor([ratios.get(name, 1.0) for name in self._names])
        expected = self._follower.left * host.copy_to(factors, found.device)[self._owner]
        # Not rounded like the residual, whose dtype has no smaller numbers than `least`.
        numbers = torch.finfo(found.dtype)
        least = numbers.tiny * numbers.eps
        limit = torch.maximum(found.abs(), expected.abs()).mul_(SAME).add_(least)
        self._scaled_otherwise.logical_or_((found - expected).abs() > limit)

    def take(self) -> tuple[Tensor, Tensor]:
        """Return the age of each element in steps, and whether its residual has changed.

        The next call begins anew with what has changed.
        """
        ages, changed = self._follower.take()
        changed.logical_or_(self._scaled_otherwise)
        self._scaled_otherwise.zero_()
        return ages, changed

    def undo(self, names: Iterable[str]) -> None:
        """The step in flight is undone for these parameters: their residual stays as it was."""
        undone = set(names)
        if not undone.isdisjoint(self._names):
            chosen = torch.tensor([name in undone for name in self._names])
            self._follower.undo(host.copy_to(chosen, self._owner.device)[self._owner])


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
