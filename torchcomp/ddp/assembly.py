"""Assembly: from DDP's buckets to the groups that are compressed together.

DDP re-groups parameters after the first iteration. A method whose result depends on the grouping
(TopK of a bucket) would then depend on the iteration, and a resumed run, whose first iteration has
the first grouping again, would take another course. Such methods work on groups that never change;
all others take DDP's buckets as they come.

After the first iteration DDP's buckets mostly hold the parameters of one group each, and only small
neighbours have changed places: a normalisation's weight and bias. Then these are put in order where
they lie. Only a group that is spread over several buckets is copied together.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from torchcomp.bucket import Bucket, Group


class Assembly:
    """Yields a group as soon as DDP has delivered all of its parameters.

    Args:
        groups: names that belong together; None takes DDP's buckets as the groups.
    """

    def __init__(self, groups: tuple[Group, ...] | None) -> None:
        self._groups = groups
        self._group_of = {name: group for group in groups or () for name in group}
        self._scratch: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._delivered: dict[Group, dict[str, Tensor]] = {}
        self._same = {frozenset(group): group for group in groups or ()}

    def begin(self) -> None:
        """Forget deliveries of a backward pass that did not finish."""
        self._delivered.clear()

    def add(self, delivery: Bucket) -> Iterator[Bucket]:
        """The groups that this delivery completes, in an order that is the same on all ranks.

        What the caller leaves in a yielded bucket is written back to DDP's buckets.
        """
        if self._groups is None or delivery.names in self._groups:
            yield delivery
        elif group := self._same.get(frozenset(delivery.names)):
            yield from self._in_order(group, delivery)
        else:
            for group in self._take(delivery):
                yield from self._staged(group, self._delivered.pop(group))

    def _in_order(self, group: Group, delivery: Bucket) -> Iterator[Bucket]:
        size_of = dict(zip(delivery.names, delivery.sizes, strict=True))
        wanted = Bucket(group, tuple(size_of[name] for name in group), delivery.flat)
        held, places = delivery.parts(), wanted.parts()
        starts, ends = _starts(delivery), _starts(wanted)
        moved = [name for name in group if starts[name] != ends[name]]
        self._move([held[name] for name in moved], [places[name] for name in moved])
        yield wanted
        self._move([places[name] for name in moved], [held[name] for name in moved])

    def _move(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Copy parts that may overlap."""
        if sources:
            sizes = [source.numel() for source in sources]
            kept = torch.cat(list(sources), out=self._buffer(sum(sizes), sources[0]))
            torch._foreach_copy_(list(targets), list(torch.split(kept, sizes)))

    def _take(self, delivery: Bucket) -> list[Group]:
        for name, part in delivery.parts().items():
            self._delivered.setdefault(self._group_of[name], {})[name] = part
        touched = dict.fromkeys(self._group_of[name] for name in delivery.names)
        return [group for group in touched if len(self._delivered[group]) == len(group)]

    def _staged(self, group: Group, parts: dict[str, Tensor]) -> Iterator[Bucket]:
        ordered = [parts[name] for name in group]
        sizes = tuple(part.numel() for part in ordered)
        flat = self._buffer(sum(sizes), ordered[0])
        torch.cat(ordered, out=flat)
        yield Bucket(group, sizes, flat)
        torch._foreach_copy_(ordered, list(torch.split(flat, list(sizes))))

    def _buffer(self, numel: int, like: Tensor) -> Tensor:
        # Groups pass one after another, so one buffer of the largest group's size serves them all.
        kind = (like.dtype, like.device)
        held = self._scratch.get(kind)
        if held is None or held.numel() < numel:
            held = self._scratch[kind] = like.new_empty(numel)
        return held[:numel]


def _starts(bucket: Bucket) -> dict[str, int]:
    """The first element of each parameter."""
    ends = accumulate(bucket.sizes)
    return {
        name: end - size for name, size, end in zip(bucket.names, bucket.sizes, ends, strict=True)
    }
