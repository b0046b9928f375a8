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
        self._shape_of_set = {frozenset(shape.names): shape for shape in groups}
        self._completed = Completed(groups)
        # Groups are processed one after another, so all of a device share one.
        self._scratch: defaultdict[torch.device, Scratch] = defaultdict(Scratch)
        self._ready: dict[Group, Iterator[Bucket]] = {}
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
        for group, delivery in self._complete(bucket):
            self._ready[group] = delivery
            waiting = self._waiting if self._in_order else [group]
            while waiting and waiting[0] in self._ready:
                yield from self._ready.pop(waiting.pop(0))

    def _complete(self, bucket: Bucket) -> Iterator[tuple[Group, Iterator[Bucket]]]:
        if bucket.names in self._shapes:
            yield bucket.names, iter((bucket,))
        elif shape := self._shape_of_set.get(frozenset(bucket.names)):
            # Small neighbours have swapped positions, such as the weight and bias of a layer.
            yield shape.names, self._in_place(shape, bucket)
        else:
            for shape, parts in self._completed.add(bucket):
                yield shape.names, self._staged(shape, parts)

    def _in_place(self, shape: BucketShape, bucket: Bucket) -> Iterator[Bucket]:
        # In one order for all ranks, ranks can move other values back before they are checked.
        ordered = Bucket(shape, bucket.flat, bucket.lasts and not self._in_order)
        before, after = bucket.parts(), ordered.parts()
        moved = [n for n in before if before[n].storage_offset() != after[n].storage_offset()]
        self._move([before[name] for name in moved], [after[name] for name in moved])
        yield ordered
        self._move([after[name] for name in moved], [before[name] for name in moved])

    def _move(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        if sources:  # which can overlap with the targets
            copies = torch.split(self._joined(sources), [source.numel() for source in sources])
            torch._foreach_copy_(list(targets), list(copies))

    def _staged(self, shape: BucketShape, parts: dict[str, Tensor]) -> Iterator[Bucket]:
        ordered = [parts[name] for name in shape.names]
        flat = self._joined(ordered)
        yield Bucket(shape, flat)
        # One launch for all parts: on CUDA, the launches of the hook delay the backward pass.
        torch._foreach_copy_(ordered, list(torch.split(flat, list(shape.sizes))))

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        numel, first = sum(part.numel() for part in parts), parts[0]
        out = self._scratch[first.device].take(numel, first.dtype, first.device)
        return torch.cat(list(parts), out=out)
