"""Slots: whether what a method keeps besides its residual is still what the last step left.

A residual is followed in every step; see samples.py. The server residual, momentum and estimates
are compared once per comparison: between that step and the one before it. What writes them in every
step is found, and a single change in between is not.
"""

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

from torchcomp import host
from torchcomp.bucket import BucketShape
from torchcomp.guard.samples import filled

_MOST = 4096
"""At most this many elements of a slot are compared."""


class Kept:
    """Remembers some elements of slots from one step to the next."""

    def __init__(self) -> None:
        self._left: dict[tuple[BucketShape, str], Tensor] = {}

    def keep(self, shape: BucketShape, slot: str, values: Tensor) -> None:
        """Remember what a step has left."""
        self._left[shape, slot] = values[:: _stride(values)].clone()

    def changed(self, shape: BucketShape, slot: str, values: Tensor, start: int) -> Tensor | None:
        """Compare what the next step has found.

        Args:
            shape: of the bucket.
            slot: its name.
            values: of the slot before the step.
            start: the element of the bucket that is the first one of the slot.

        Returns:
            The number of elements that differ, by parameter. None if nothing was remembered.
        """
        left = self._left.pop((shape, slot), None)
        stride = _stride(values)
        found = values[::stride]
        if left is None or left.shape != found.shape or left.dtype != found.dtype:
            return None
        owner = _owner(shape, start, len(found), stride, values.device)
        counts = torch.zeros(len(filled(shape)[0]), device=values.device)
        return counts.index_add_(0, owner, (found != left).float())

    def forget(self, names: Iterable[str] | None = None) -> None:
        """Forget the slots of these parameters, or all."""
        gone = None if names is None else set(names)
        for key in list(self._left):
            if gone is None or not gone.isdisjoint(key[0].names):
                del self._left[key]


def _stride(values: Tensor) -> int:
    return max(1, -(-values.numel() // _MOST))


@lru_cache(maxsize=1024)
def _owner(shape: BucketShape, start: int, count: int, stride: int, device: torch.device) -> Tensor:
    """Return the position in `filled` of the parameter of each element that is compared."""
    ends = torch.tensor(filled(shape)[1]).cumsum(0)
    at = torch.arange(count) * stride + start
    return host.copy_to(torch.bucketize(at, ends, right=True), device)
