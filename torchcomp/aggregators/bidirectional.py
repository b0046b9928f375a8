"""Bidirectional: compress the messages to the owners of shards, and their messages back."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from torchcomp.aggregators.base import Cost, Law, Residual, ResidualDtype
from torchcomp.compressors import Compressor
from torchcomp.engine.bucket import BucketShape
from torchcomp.engine.keys import Key
from torchcomp.engine.prepared import Prepared
from torchcomp.engine.state import Kind, Slot
from torchcomp.routes.codec import nbytes_of, vectors_of
from torchcomp.routes.sharded import ShardedRoute
from torchcomp.routes.sharded_load import sharded_load
from torchcomp.routes.shards import Direction, direction
from torchcomp.specs.component import Choices, check_kind
from torchcomp.specs.errors import SpecError


@dataclass(frozen=True)
class Bidirectional(Residual):
    """``bidirectional(topk(0.01), topk(0.01))``: error feedback in both directions.

    C and D are compressors. Traffic per rank does not grow with the number of ranks W. Each rank is
    a worker, and the parameter server (owner) of one shard. Let g be its gradient, e its residual
    as a worker and d its server residual. Both residuals start at 0.

    1. worker: x = g + e
    2. worker: message = C(x); each owner gets the entries of its shard
    3. worker: e <- x - message
    4. owner: s = sum of all ranks' messages / W + d
    5. owner: downlink message = D(s)
    6. owner: d <- s - downlink message
    7. all ranks: g <- the downlink messages of all owners

    Nothing is lost, up to the rounding of the residual's dtype: the sum of all applied means, plus
    the mean of e, plus d equals the sum of all mean gradients.

    Reference: Zou, "Bidirectional TopK sparsification for distributed learning", University of
    Waterloo, 2022 (arXiv 2209.15203). There, one machine is the server, and residuals include the
    learning rate: the same as ``selection="exact"`` with ``register(..., lr_inside=optimizer)``.

    Attributes:
        up: C, contractive. Use ``identity`` to compress only the downlink.
        down: D, contractive. With ``identity``, the method is ``ef(C)`` over the sharded route.
        selection: set of entries from which topk selects. "shard" selects from each shard
            separately (``k=5`` takes 5 per shard). "exact" selects from the whole bucket, as in the
            thesis: the owners search for a common threshold, from that of the previous step. The
            first step can send several times the bytes of :func:`torchcomp.explain`.
        memory_dtype: dtype of both residuals; see Residual.
    """

    name: ClassVar[str] = "bidirectional"
    positional: ClassVar[int] = 2
    example: ClassVar[str] = "bidirectional(topk(0.01), topk(0.01))"

    up: Compressor
    down: Compressor
    selection: Annotated[str, Choices(("exact", "shard"))] = "shard"
    memory_dtype: ResidualDtype = None

    def __post_init__(self) -> None:
        for way in ("up", "down"):
            check_kind(self, way, Compressor)
        super().__post_init__()
        for way, part in (("up", self.up), ("down", self.down)):
            if self.selection == "exact" and not (part.selects or part.elementwise):
                problem = "needs a whole vector on one rank, and owners have shards"
                raise SpecError(f'{part.name} {problem}: use selection="shard"', way)

    def slots(self, shape: BucketShape, world_size: int, rank: int) -> tuple[Slot, ...]:
        error, owned = self.error_slot(shape), shape.shard(world_size, rank)
        # DEBT, because it is also unsent gradient: a change of method must not drop it.
        server = Slot("server_error", Kind.DEBT, owned.names, owned.sizes, error.dtype, True)
        _, down = self._directions(shape, world_size)
        if not down.exact:
            return error, server
        names = tuple(vector.name for vector in down.whole)
        # One threshold per vector, as the bits of a float up to float64. It starts the next search.
        ones = (1,) * len(names)
        return error, server, Slot("thresholds", Kind.CACHE, names, ones, torch.int64)

    def law(self, shape: BucketShape) -> Law:
        slots = ("error", "server_error")
        return Law(before=dict.fromkeys(slots, -1.0), after=dict.fromkeys(slots, 1.0))

    def cost(self, shape: BucketShape, world_size: int, rank: int = 0, node: int = 1) -> Cost:
        nbytes = nbytes_of(vectors_of(self.up, shape.names, shape.sizes, shape.dtype))
        load = sharded_load(*self._directions(shape, world_size), rank, node)
        return Cost("sharded", nbytes, load)

    def prepare(self, bucket: Prepared) -> None:
        up, down = self._directions(bucket.shape, bucket.exchange.world_size)
        bucket.route = ShardedRoute(bucket, up, down, bucket.slots["error"].dtype)

    def aggregate(self, g: Tensor, bucket: Prepared, key: Key) -> None:
        e, e_next = bucket.open("error")
        bucket.route.send_sum(g, e, e_next, key)  # steps 1 to 3
        bucket.write_mean(g, e_next)  # steps 4 to 7

    def _directions(self, shape: BucketShape, world_size: int) -> tuple[Direction, Direction]:
        return (
            direction("up", self.up, self.selection, shape, world_size),
            direction("down", self.down, self.selection, shape, world_size),
        )
