"""Bidirectional: compressed on the way to the owners of shards, and on the way back."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from torchcomp.aggregators.base import Cost
from torchcomp.aggregators.residual import Residual, check_contractive, write_mean
from torchcomp.bucket import Bucket, BucketShape
from torchcomp.checks import check_choice
from torchcomp.codec import codec
from torchcomp.component import check_kind
from torchcomp.compressors import Compressor
from torchcomp.errors import SpecError
from torchcomp.exchange import Exchange
from torchcomp.keys import Key
from torchcomp.routes import ShardedRoute
from torchcomp.routes.sharded import Direction, direction, sharded_load
from torchcomp.state import Kind, Slot, State


@dataclass(frozen=True)
class Bidirectional(Residual):
    """``bidirectional(C, D)``: error feedback on both ways, so traffic does not grow with ranks.

    With e the residual of this rank as a worker and d its server residual, as the owner of a shard
    (both 0 at the start), g its gradient and W the number of ranks:

    worker
      1. x = g + e
      2. message = C(x); each owner gets the entries of its shard
      3. e <- x - message
    owner, the parameter server of its shard
      4. s = sum of all ranks' messages / W + d
      5. downlink message = D(s)
      6. d <- s - downlink message
    everybody
      7. g <- the downlink messages of all owners

    Nothing is lost: the sum of all applied means plus the mean of e plus d equals the sum of all
    mean gradients, up to the rounding of the residual's dtype.

    Reference: Zou, "Bidirectional TopK sparsification for distributed learning", University of
    Waterloo, 2022 (arXiv 2209.15203). There the server is one machine and the learning rate is
    inside the residuals; with a constant rate and ``selection="exact"`` that is the same method.

    Attributes:
        up: C, contractive. ``identity`` compresses the downlink only.
        down: D, contractive. ``identity`` is ``ef(C)`` by another route.
        selection: what topk selects from. "shard": every shard separately, with a fixed number of
            entries (``k=5`` are 5 of each shard), so there is nothing to search together. "exact":
            the whole bucket, as one server would, which is the thesis's method; the owners search
            a threshold together first, from the last step's. The first step has none, and may send
            several times the bytes that :func:`torchcomp.explain` plans for a step.
        memory_dtype: dtype of both residuals (see Residual).
    """

    name: ClassVar[str] = "bidirectional"
    positional: ClassVar[int] = 2
    example: ClassVar[str] = "bidirectional(topk(0.01), topk(0.01))"

    up: Compressor
    down: Compressor
    selection: str = "shard"
    memory_dtype: str | None = None

    def __post_init__(self) -> None:
        for way in ("up", "down"):
            check_kind(self, way, Compressor)
            check_contractive(self, way)
        check_choice("selection", self.selection, ("exact", "shard"), owner=self.name)
        super().__post_init__()
        for way in ("up", "down"):
            compressor: Compressor = getattr(self, way)
            if self.selection == "exact" and not (compressor.selects or compressor.elementwise):
                raise SpecError(
                    f"{compressor.name} works on whole vectors, and the parts of a bucket lie on "
                    'several ranks: with selection="shard" it works on every shard separately',
                    way,
                )

    @property
    def whole_model(self) -> bool:
        return self.up.whole_model or self.down.whole_model

    def traces(self, dtype: torch.dtype) -> bool:
        return self.shows(self.up, dtype)

    def slots(self, shape: BucketShape, world_size: int, rank: int) -> tuple[Slot, ...]:
        error, owned = self.error_slot(shape), shape.shards(world_size)[rank]
        server = Slot("server_error", Kind.DEBT, owned.names, owned.sizes, error.dtype, True)
        _, down = self._directions(shape, world_size)
        if not down.exact:
            return error, server
        names = tuple(vector.name for vector in down.whole.vectors)
        ones = (1,) * len(names)
        return error, server, Slot("thresholds", Kind.CACHE, names, ones, torch.int64)

    def cost(self, shape: BucketShape, world_size: int, rank: int = 0) -> Cost:
        nbytes = codec(self.up, shape.names, shape.sizes, shape.dtype).nbytes
        load = sharded_load(*self._directions(shape, world_size), rank)
        return Cost("sharded", nbytes, load)

    def aggregate(self, bucket: Bucket, exchange: Exchange, state: State, key: Key) -> None:
        g, ranks = bucket.flat, exchange.world_size
        error, *server = self.slots(bucket.shape, ranks, exchange.rank)
        e, x = state.open(error, g.device)
        up, down = self._directions(bucket.shape, ranks)
        route = ShardedRoute(up, down, exchange, key, state, error.dtype, *server)
        route.send_sum(g, e, x)
        route.sent(x, -1.0)
        write_mean(route, g, x)

    def _directions(self, shape: BucketShape, world_size: int) -> tuple[Direction, Direction]:
        return (
            direction("up", self.up, self.selection, shape, world_size),
            direction("down", self.down, self.selection, shape, world_size),
        )
