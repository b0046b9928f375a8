"""Sampled: an aggregator that averages only the sampled layers, by another aggregator."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from torchcomp.aggregators.base import Aggregator, Cost
from torchcomp.bucket import Bucket, BucketShape, Group
from torchcomp.component import check_kind
from torchcomp.errors import SpecError
from torchcomp.jointspar.sampler import Sampler
from torchcomp.keys import Key
from torchcomp.prepared import Prepared
from torchcomp.state import Slot

_MOST = 16
"""Sets of kept layers for which a bucket stays prepared."""


@dataclass(frozen=True)
class Sampled(Aggregator):
    """Algorithm 2 of JointSpar on one bucket, from the gradient to the mean.

    1. Set g_hat_d = g_d / p_d for the layers that this rank keeps, and 0 for the others.
    2. Average g_hat by `inner`, as one vector of the layers that any rank keeps. Nothing else is
       sent.
    3. Return 0 for the layers that no rank keeps. Their residuals do not change.

    Some aggregators give different results if parameters are grouped differently. With these, each
    bucket must be a layer or a part of one (see :func:`by_layer`). Otherwise the parameters that
    are compressed together would change from step to step.

    Args:
        inner: averages the kept layers.
        sampler: which layers are kept, and with what probabilities.
    """

    name: ClassVar[str] = "jointspar"

    inner: Aggregator
    sampler: Sampler = field(compare=False)

    def __post_init__(self) -> None:
        check_kind(self, "inner", Aggregator)
        if self.inner.whole_model:
            raise SpecError(
                f"jointspar: {self.inner} selects from the gradients of the whole model, but "
                'dropped layers have none: use scope="bucket" (here: one layer) or scope="tensor"',
                "inner",
            )

    def __str__(self) -> str:
        # This text is compared across ranks and with checkpoints, so it lists every option.
        return f"{self.name}({self.inner}, {self.sampler.options})"

    @property
    def depends_on_grouping(self) -> bool:
        return self.inner.depends_on_grouping

    @property
    def rehearsed(self) -> Aggregator:
        # Which layers are kept is known only inside a step.
        return self.inner.rehearsed

    def slots(self, shape: BucketShape, world_size: int, rank: int) -> tuple[Slot, ...]:
        return self.inner.slots(shape, world_size, rank)

    def cost(self, shape: BucketShape, world_size: int, rank: int = 0, node: int = 1) -> Cost:
        """Return the cost of a step that keeps all layers of the bucket."""
        return self.inner.cost(shape, world_size, rank, node)

    def prepare(self, bucket: Prepared) -> None:
        # By the parameters of the kept layers, which are others in every step.
        bucket.work = {}

    def aggregate(self, g: Tensor, bucket: Prepared, key: Key) -> None:
        sampler, whole = self.sampler, Bucket(bucket.shape, g)
        parts = whole.parts()
        layers = {name: sampler.layer_of[name] for name in parts}
        # The first bucket of a step runs the collective. The others reuse its result.
        exchanged = sampler.union(bucket.exchange)
        kept = {name: x for name, x in parts.items() if sampler.kept[layers[name]]}
        if not sampler.shared:
            # Before the division by p: each rank learns from its own undivided gradients.
            sampler.record_norms(kept)
        # 1. g_hat. With _foreach_ operations many small tensors take few kernel launches.
        factors = [1 / float(sampler.p[layers[name]]) for name in kept]
        if any(factor != 1 for factor in factors):
            torch._foreach_mul_(list(kept.values()), factors)
        if len(kept) < len(parts):
            torch._foreach_zero_([x for name, x in parts.items() if name not in kept])
        # 2. The mean. All ranks have the same `exchanged`, so they all call `inner` or all return.
        sent = {name: x for name, x in parts.items() if exchanged[layers[name]]}
        if not sent:
            return
        packed = whole
        if len(sent) < len(parts):
            packed = Bucket(bucket.shape.select(sent), torch.cat(list(sent.values())))
        self.inner.aggregate(packed.flat, self._inner(bucket, packed.shape), key)
        means = packed.parts()
        if sampler.shared:
            # Means are equal on all ranks, so the probabilities learned from them stay equal.
            sampler.record_norms(means)
        if packed is not whole:
            torch._foreach_copy_(list(sent.values()), list(means.values()))

    def _inner(self, bucket: Prepared, shape: BucketShape) -> Prepared:
        """Return the bucket of the kept layers, prepared for the inner method."""
        prepared: Prepared | None = bucket.work.get(shape)
        if prepared is None:
            if len(bucket.work) >= _MOST:
                bucket.work.clear()
            prepared = self.inner.prepared(shape, bucket.exchange, bucket.state, bucket.device)
            bucket.work[shape] = prepared
        return prepared


def by_layer(groups: Iterable[Group], layer_of: Mapping[str, int]) -> tuple[Group, ...]:
    """Split groups of parameters, so that each new group has parameters of one layer only."""
    divided: dict[tuple[int, int], list[str]] = {}
    for i, group in enumerate(groups):
        for name in group:
            divided.setdefault((i, layer_of[name]), []).append(name)
    return tuple(map(tuple, divided.values()))
