"""Sampled: an aggregator that exchanges the layers of a selection by another aggregator."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import compress
from typing import ClassVar

import torch
from torch import Tensor

from torchcomp.aggregators.base import Aggregator, Shape
from torchcomp.bucket import Bucket, Group
from torchcomp.component import check_kind
from torchcomp.errors import SpecError
from torchcomp.exchange import Exchange
from torchcomp.jointspar.selection import Selection
from torchcomp.keys import Key
from torchcomp.state import State
from torchcomp.traffic import Load


@dataclass(frozen=True)
class Sampled(Aggregator):
    """Algorithm 2 of JointSpar, from the gradient to the mean, on one bucket.

    1. g_hat_d = g_d / p_d for the layers that this rank keeps, 0 for the others
    2. of the layers that any rank keeps: g_hat <- `inner` of g_hat, as one vector; nothing else is
       sent
    3. 0 for the layers that no rank keeps; their error memory stays as it is

    Where the result of `inner` depends on the grouping, buckets must be layers or parts of layers
    (see :func:`by_layer`): what is compressed together would change from step to step otherwise.

    Attributes:
        inner: how the kept layers are exchanged.
        selection: which layers these are; it changes from step to step.
        law: how layers are chosen, for comparison between ranks and with checkpoints.
    """

    name: ClassVar[str] = "jointspar"

    inner: Aggregator
    selection: Selection = field(compare=False)
    law: str

    def __post_init__(self) -> None:
        check_kind(self, "inner", Aggregator)
        if self.inner.whole_model:
            raise SpecError(
                f"jointspar: {self.inner} selects from all gradients of the model at once, and "
                'these are not all there: use scope="bucket" (here: of each layer) or "tensor"',
                "inner",
            )

    def __str__(self) -> str:
        return f"{self.name}({self.inner}, {self.law})"

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        """Whether the inner aggregator keeps an error memory."""
        return self.inner.remembers

    @property
    def owes(self) -> bool:  # type: ignore[override]
        """Whether its owners of shards keep one, too."""
        return self.inner.owes

    @property
    def depends_on_grouping(self) -> bool:
        return self.inner.depends_on_grouping

    @property
    def whole_model(self) -> bool:
        return False

    def route(self, shape: Shape, world_size: int) -> str:
        return self.inner.route(shape, world_size)

    def message_bytes(self, shape: Shape) -> int:
        part = self._exchanged(shape)
        return self.inner.message_bytes(part) if part[0] else 0

    def load(self, shape: Shape, world_size: int, rank: int) -> Load:
        part = self._exchanged(shape)
        return self.inner.load(part, world_size, rank) if part[0] else Load()

    def memory_bytes(self, numel: int, dtype: torch.dtype, world_size: int) -> int:
        return self.inner.memory_bytes(numel, dtype, world_size)

    def aggregate(self, bucket: Bucket, exchange: Exchange, state: State, key: Key) -> None:
        exchanged = self.selection.agree(exchange)
        self._divide(bucket)
        wanted, dropped = {}, []
        for name, part in bucket.parts().items():
            if exchanged[self.selection.layer(name)]:
                wanted[name] = part
            else:
                dropped.append(part)
        if dropped:
            torch._foreach_zero_(dropped)
        if not wanted:
            return
        taken = _taken(bucket, wanted)
        self.inner.aggregate(taken, exchange, state, key)
        means = taken.parts()
        self.selection.note_mean(means)
        if taken is not bucket:
            torch._foreach_copy_(list(wanted.values()), list(means.values()))

    def _divide(self, bucket: Bucket) -> None:
        selection = self.selection
        kept, factors = {}, []
        for name, part in bucket.parts().items():
            layer = selection.layer(name)
            if selection.kept[layer]:
                kept[name] = part
                factors.append(1 / float(selection.p[layer]))
            elif not selection.shared:
                part.zero_()
        if not selection.shared:
            selection.note_own(kept)
        if any(factor != 1 for factor in factors):
            torch._foreach_mul_(list(kept.values()), factors)

    def _exchanged(self, shape: Shape) -> Shape:
        """What of a bucket travels in this step."""
        exchanged = self.selection.exchanged
        if exchanged is None:
            raise RuntimeError("the ranks have not agreed yet on what they exchange")
        names, sizes, dtype = shape
        chosen = [exchanged[self.selection.layer(name)] for name in names]
        return tuple(compress(names, chosen)), tuple(compress(sizes, chosen)), dtype


def by_layer(groups: Iterable[Group], selection: Selection) -> tuple[Group, ...]:
    """Divide groups of parameters so that each holds parameters of one layer."""
    divided: list[Group] = []
    for group in groups:
        layers: dict[int, list[str]] = {}
        for name in group:
            layers.setdefault(selection.layer(name), []).append(name)
        divided += [tuple(names) for names in layers.values()]
    return tuple(divided)


def _taken(bucket: Bucket, parts: dict[str, Tensor]) -> Bucket:
    """These parts of a bucket as a bucket; itself, if that is all."""
    if len(parts) == len(bucket.names):
        return bucket
    sizes = tuple(part.numel() for part in parts.values())
    return Bucket(tuple(parts), sizes, torch.cat(list(parts.values())))
