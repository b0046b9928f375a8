"""Sampled: an aggregator that exchanges the layers of a sampler's set by another aggregator."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from torchcomp.aggregators.base import Aggregator, Cost
from torchcomp.bucket import Bucket, BucketShape, Group
from torchcomp.component import check_kind
from torchcomp.errors import SpecError
from torchcomp.exchange import Exchange
from torchcomp.jointspar.sampler import Sampler
from torchcomp.keys import Key
from torchcomp.state import Slot, State


@dataclass(frozen=True)
class Sampled(Aggregator):
    """Algorithm 2 of JointSpar, from the gradient to the mean, on one bucket.

    1. g_hat_d = g_d / p_d for the layers that this rank keeps, 0 for the others
    2. of the layers that any rank keeps: g_hat <- `inner` of g_hat, as one vector; nothing else is
       sent
    3. 0 for the layers that no rank keeps; their residuals stay as they are

    Where the result of `inner` depends on the grouping, buckets must be layers or parts of layers
    (see :func:`by_layer`): what is compressed together would change from step to step otherwise.
    """

    name: ClassVar[str] = "jointspar"

    inner: Aggregator
    sampler: Sampler = field(compare=False)

    def __post_init__(self) -> None:
        check_kind(self, "inner", Aggregator)
        if self.inner.whole_model:
            raise SpecError(
                f"jointspar: {self.inner} selects from all gradients of the model at once, and "
                'these are not all there: use scope="bucket" (here: of each layer) or "tensor"',
                "inner",
            )

    def __str__(self) -> str:
        # Ranks compare it with each other, and with checkpoints.
        return f"{self.name}({self.inner}, {self.sampler.law})"

    @property
    def depends_on_grouping(self) -> bool:
        return self.inner.depends_on_grouping

    def slots(self, shape: BucketShape, world_size: int, rank: int) -> tuple[Slot, ...]:
        return self.inner.slots(shape, world_size, rank)

    def cost(self, shape: BucketShape, world_size: int, rank: int = 0) -> Cost:
        """What a step costs that keeps all of the bucket."""
        return self.inner.cost(shape, world_size, rank)

    def aggregate(self, bucket: Bucket, exchange: Exchange, state: State, key: Key) -> None:
        sampler, parts = self.sampler, bucket.parts()
        layers = {name: sampler.layer_of[name] for name in parts}
        exchanged = sampler.union(exchange)
        kept = {name: x for name, x in parts.items() if sampler.kept[layers[name]]}
        if not sampler.shared:
            sampler.note(kept)
        factors = [1 / float(sampler.p[layers[name]]) for name in kept]
        if any(factor != 1 for factor in factors):
            torch._foreach_mul_(list(kept.values()), factors)
        if len(kept) < len(parts):
            torch._foreach_zero_([x for name, x in parts.items() if name not in kept])
        wanted = {name: x for name, x in parts.items() if exchanged[layers[name]]}
        if not wanted:
            return
        taken = bucket
        if len(wanted) < len(parts):
            taken = Bucket(bucket.shape.select(wanted), torch.cat(list(wanted.values())))
        self.inner.aggregate(taken, exchange, state, key)
        means = taken.parts()
        if sampler.shared:
            sampler.note(means)
        if taken is not bucket:
            torch._foreach_copy_(list(wanted.values()), list(means.values()))


def by_layer(groups: Iterable[Group], layer_of: Mapping[str, int]) -> tuple[Group, ...]:
    """Divide groups of parameters so that each holds parameters of one layer."""
    divided: dict[tuple[int, int], list[str]] = {}
    for i, group in enumerate(groups):
        for name in group:
            divided.setdefault((i, layer_of[name]), []).append(name)
    return tuple(map(tuple, divided.values()))
