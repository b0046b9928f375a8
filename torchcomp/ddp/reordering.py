"""Reordering: turn DDP's buckets into the groups of parameters that are compressed together.

DDP rebuilds its buckets after the first iteration, and a resumed run starts with the first ones
again. Methods whose result depends on which parameters share a bucket, such as TopK, therefore work
on groups that never change. All others use DDP's buckets.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from torchcomp.engine.bucket import Bucket, BucketShape, Group
from torchcomp.engine.host import Scratch


class Completed:
    """Collects the parameters of groups from DDP's buckets; None takes these as the groups."""

    def __init__(self, groups: Sequence[BucketShape] | None) -> None:
        by_name = {name: shape for shape in groups or () for name in shape.names}
        self._shapes = None if groups is None else by_name
        self.pending: dict[Group, dict[str, Tensor]] = {}  # parts of incomplete groups

    def add(self, bucket: Bucket) -> Iterator[tuple[BucketShape, dict[str, Tensor]]]:
        """Yield what a bucket completes, in the same order on all ranks: groups and their parts."""
        if self._shapes is None:
            yield bucket.shape, bucket.parts()
            return
        for name, part in bucket.parts().items():
            shape = self._shapes[name]
            parts = self.pending.setdefault(shape.names, {})
            parts[name] = part
            if len(parts) == len(shape.names):
                yield shape, self.pending.pop(shape.names)


class Reordering:
    """Yields each group as soon as all of its parameters are in DDP's buckets.

    With `in_order`, in the order of `groups`, for ranks whose DDP has other buckets.
    """

    def __init__(self, groups: Sequence[BucketShape], in_order: bool = False) -> None:
        self._in_order = in_order
        self._shapes = {shape.names: shape for shape in groups}
        self._completed = Completed(groups)
        # Groups are processed one after another, so all of a device share one.
        self._scratch: defaultdict[torch.device, Scratch] = defaultdict(Scratch)
        self._ready: dict[Group, dict[str, Tensor]] = {}
        self._waiting: list[Group] = []  # with `in_order`, groups that were not yielded yet

    def begin(self) -> None:
        """Discard the buckets of a backward pass that did not finish."""
        self._completed.pending.clear()
        self._ready.clear()
        self._waiting = list(self._shapes)

    def add(self, bucket: Bucket) -> Iterable[Bucket]:
        """Return the groups that a bucket completes, in the same order on all ranks.

        Each is written back to DDP's buckets when the caller, who changes it, asks for the next.
        """
        if not self._in_order and bucket.shape.names in self._shapes:
            return (bucket,)
        return self._ordered(bucket)

    def _ordered(self, bucket: Bucket) -> Iterator[Bucket]:
        for shape, parts in self._completed.add(bucket):
            self._ready[shape.names] = parts
            waiting = self._waiting if self._in_order else [shape.names]
            while waiting and waiting[0] in self._ready:
                group = waiting.pop(0)
                yield from self._staged(self._shapes[group], self._ready.pop(group))

    def _staged(self, shape: BucketShape, parts: dict[str, Tensor]) -> Iterator[Bucket]:
        ordered = [parts[name] for name in shape.names]
        first, numel = ordered[0], sum(shape.sizes)
        flat = self._scratch[first.device].take(numel, first.dtype, first.device)
        yield Bucket(shape, torch.cat(ordered, out=flat))
        # One launch for all parts: on CUDA, the launches of the hook delay the backward pass.
        torch._foreach_copy_(ordered, list(torch.split(flat, list(shape.sizes))))
