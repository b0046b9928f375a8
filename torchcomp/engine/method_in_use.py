"""MethodInUse: the method that an averager runs, its buckets, and what each is prepared with."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from torchcomp.aggregators import EF
from torchcomp.aggregators.base import Aggregator
from torchcomp.compressors import Identity
from torchcomp.engine.bucket import BucketShape, Group, Shard, merge
from torchcomp.engine.prepared import Prepared
from torchcomp.engine.state import Slot, State
from torchcomp.exchange import Exchange

FLUSH = EF(Identity())
"""Sends a residual that the next method has no slot for, usually in one step."""

ClientSlots = Callable[[BucketShape], tuple[Slot, ...]]


class MethodInUse:
    """The method that runs, and the buckets that it averages."""

    method: Aggregator  # with all of its stages
    now: Aggregator  # that of the current stage
    _stage: tuple[int, int]  # the steps of the current stage: from, and before

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        groups: Sequence[Group],
        merged: bool,
        client_slots: ClientSlots | None,
    ) -> None:
        self.groups = self.buckets = tuple(groups)
        self._parameters, self._merged, self._client_slots = parameters, merged, client_slots
        self._shapes: dict[Group, BucketShape] = {}
        self._prepared: dict[Group, Prepared] = {}

    def install(self, method: Aggregator, step: int, state: State, exchange: Exchange) -> None:
        """Run another method, or other groups, from a step on. The state follows."""
        owned, before = self.owned(exchange), self.buckets
        merged = method.whole_model and self._merged
        self.buckets = merge(self.groups, self._parameters) if merged else self.groups
        self.run(method, step)
        declared = {slot.name: slot for slot in self.slots(exchange)}
        # A server residual is stored by the shards of the old buckets, and fits no others.
        if self.buckets != before or not any(slot.sharded for slot in declared.values()):
            state.unshard(owned, exchange.world_size)
        state.keep(declared)

    def run(self, method: Aggregator, step: int) -> None:
        self.method = self.now = method
        self._stage = 0, 0
        self.forget()
        self.at(step)

    def at(self, step: int) -> None:
        if self._stage[0] <= step < self._stage[1]:
            return
        starts = (*self.method.stages, sys.maxsize)
        self._stage = next(pair for pair in pairwise(starts) if pair[0] <= step < pair[1])
        now = self.method.at(step)
        if now != self.now:
            # A stage has workspaces of its own, and those of a high ratio are large.
            self.now = now
            self._prepared.clear()

    def forget(self) -> None:
        """Prepare all buckets again, because the ranks, the state or the method have changed."""
        self._prepared.clear()

    def prepared(
        self, shape: BucketShape, exchange: Exchange, state: State, device: torch.device
    ) -> Prepared:
        """Return a bucket of this shape, prepared for the method of the current stage."""
        found = self._prepared.get(shape.names)
        # `is` first: comparing two shapes compares hundreds of names.
        same = found is not None and (found.shape is shape or found.shape == shape)
        if found is not None and same and found.device == device:
            return found
        # Drop those from before DDP rebuilt its buckets.
        names = set(shape.names)
        self._prepared = {n: p for n, p in self._prepared.items() if names.isdisjoint(n)}
        prepared = self._prepared[shape.names] = self.now.prepared(shape, exchange, state, device)
        return prepared

    def shape_of(self, group: Group) -> BucketShape:
        shape = self._shapes.get(group)
        if shape is None:
            shape = self._shapes[group] = BucketShape.of(group, self._parameters)
        return shape

    def owned(self, exchange: Exchange) -> list[Shard]:
        """Return this rank's shard of each bucket."""
        shapes = map(self.shape_of, self.buckets)
        return [shape.shard(exchange.world_size, exchange.rank) for shape in shapes]

    def slots(
        self,
        exchange: Exchange,
        method: Aggregator | None = None,
        buckets: Sequence[Group] | None = None,
    ) -> Iterator[Slot]:
        """Iterate over the slots of all buckets: the method's, then the client's."""
        for group in self.buckets if buckets is None else buckets:
            shape = self.shape_of(group)
            yield from (method or self.method).slots(shape, exchange.world_size, exchange.rank)
            if self._client_slots is not None:
                yield from self._client_slots(shape)
