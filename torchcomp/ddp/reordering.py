"""Reordering: from DDP's buckets to the groups that are compressed together.

DDP re-groups parameters after the first iteration. A method whose result depends on the grouping
(TopK of a bucket) would then depend on the iteration, and a resumed run, whose first iteration has
the first grouping again, would take another course. Such methods work on groups that never change;
all others take DDP's buckets as they come.

After the first iteration DDP's buckets mostly hold the parameters of one group each, and only small
neighbours have changed places: a normalisation's weight and bias. Then these are put in order where
they lie. Only a group that is spread over several buckets is copied together.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torchcomp.bucket import Bucket, BucketShape, Group


class Reordering:
    """Yields a group as soon as DDP has brought all of its parameters.

    Args:
        groups: shapes of what belongs together; None takes DDP's buckets as the groups.
    """

    def __init__(self, groups: Sequence[BucketShape] | None) -> None:
        self._any = groups is None
        self._shapes = {shape.names: shape for shape in groups or ()}
        self._group_of = {name: names for names in self._shapes for name in names}
        self._same = {frozenset(names): names for names in self._shapes}
        self._scratch: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._held: dict[Group, dict[str, Tensor]] = {}

    def begin(self) -> None:
        """Forget the buckets of a backward pass that did not finish."""
        self._held.clear()

    def add(self, bucket: Bucket) -> Iterator[Bucket]:
        """The groups that one of DDP's buckets completes, in the same order on all ranks.

        What the caller leaves in a yielded bucket is written back to DDP's buckets.
        """
        if self._any or bucket.shape.names in self._shapes:
            yield bucket
        elif group := self._same.get(frozenset(bucket.names)):
            yield from self._in_order(self._shapes[group], bucket)
        else:
            for name, part in bucket.parts().items():
                self._held.setdefault(self._group_of[name], {})[name] = part
            for group in dict.fromkeys(self._group_of[name] for name in bucket.names):
                if len(self._held[group]) == len(group):
                    yield from self._staged(self._shapes[group], self._held.pop(group))

    def _in_order(self, shape: BucketShape, bucket: Bucket) -> Iterator[Bucket]:
        wanted = Bucket(shape, bucket.flat)
        held, places = bucket.parts(), wanted.parts()
        moved = [
            name
            for name in shape.names
            if held[name].storage_offset() != places[name].storage_offset()
        ]
        self._move([held[name] for name in moved], [places[name] for name in moved])
        yield wanted
        self._move([places[name] for name in moved], [held[name] for name in moved])

    def _move(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Copy parts that may overlap."""
        if sources:
            sizes = [source.numel() for source in sources]
            kept = torch.cat(list(sources), out=self._buffer(sum(sizes), sources[0]))
            torch._foreach_copy_(list(targets), list(torch.split(kept, sizes)))

    def _staged(self, shape: BucketShape, parts: dict[str, Tensor]) -> Iterator[Bucket]:
        ordered = [parts[name] for name in shape.names]
        flat = self._buffer(shape.numel, ordered[0])
        torch.cat(ordered, out=flat)
        yield Bucket(shape, flat)
        torch._foreach_copy_(ordered, list(torch.split(flat, list(shape.sizes))))

    def _buffer(self, numel: int, like: Tensor) -> Tensor:
        # Groups pass one after another, so one buffer of the largest group's size serves them all.
        kind = (like.dtype, like.device)
        held = self._scratch.get(kind)
        if held is None or held.numel() < numel:
            held = self._scratch[kind] = like.new_empty(numel)
        return held[:numel]
