"""OneWay: base of the aggregators that compress what a rank sends, but not the mean it receives."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated

import torch

from torchcomp.aggregators.base import Aggregator, Cost
from torchcomp.compressors import Compressor, Identity
from torchcomp.compressors.base import Vector
from torchcomp.engine.bucket import BucketShape
from torchcomp.engine.prepared import Prepared
from torchcomp.exchange.traffic import Load, gathered
from torchcomp.routes import wire
from torchcomp.routes.allgather import AllGatherRoute
from torchcomp.routes.allreduce import AllReduceRoute
from torchcomp.routes.codec import Codec, nbytes_of, vectors_of
from torchcomp.routes.sharded import ShardedRoute
from torchcomp.routes.sharded_load import sharded_load
from torchcomp.routes.shards import Direction, direction
from torchcomp.specs.component import Choices, check_kind
from torchcomp.specs.errors import SpecError

COLLECTIVES = Choices(("auto", "allreduce", "allgather", "sharded"))
# Earlier versions used these names. Specs in old checkpoints and scripts can still contain them.
_OLD_NAMES = {"sum": "allreduce", "gather": "allgather"}
_DENSE = Identity()


@dataclass(frozen=True)
class OneWay(Aggregator):
    """A compressor and the route of its messages.

    Attributes:
        compressor: applied to what a rank sends.
        exchange: collective that carries the messages. "auto" uses allreduce if messages can be
            added, and otherwise allgather or sharded, whichever moves fewer bytes.
    """

    compressor: Compressor
    exchange: Annotated[str, COLLECTIVES] = "auto"

    def __post_init__(self) -> None:
        check_kind(self, "compressor", Compressor)
        if isinstance(self.exchange, str):
            # The dataclass is frozen. Store the current name, so that equal methods compare equal.
            object.__setattr__(self, "exchange", _OLD_NAMES.get(self.exchange, self.exchange))
        super().__post_init__()
        if self.exchange == "allreduce" and not self.compressor.summable:
            raise SpecError(
                f'{self.name}: exchange="allreduce" needs messages that can be added, and those of '
                f'{self.compressor.name} cannot. Use exchange="allgather" or "sharded"',
                "exchange",
            )
        if self.exchange == "sharded" and not _divisible(self.compressor):
            raise SpecError(
                f'{self.name}: exchange="sharded" divides a message among the owners of shards, '
                f"and one of {self.compressor.name} cannot be divided. "
                'Use exchange="allgather" or "allreduce"',
                "exchange",
            )

    def at(self, step: int) -> Aggregator:
        now = super().at(step)
        # The dense stage of a warm-up. An all-gather would send it once to every other rank.
        if now is self or not isinstance(now, OneWay) or self.exchange != "allgather":
            return now
        return replace(now, exchange="allreduce") if now.compressor == _DENSE else now

    def sum_dtype(self, gradient: torch.dtype) -> torch.dtype:
        """The dtype of the sum over the ranks, for gradients of dtype `gradient`."""
        return gradient

    def sum_rounding(self, shape: BucketShape) -> tuple[float, float]:
        """Return the `error` and `smallest` of a law, for an all-reduce; 0 without one."""
        # In 16 bits, each hop rounds the partial sum, and no residual records it.
        if not self.compressor.summable:
            return 0.0, 0.0
        (values,) = self.compressor.layout(1, shape.dtype)
        numbers = torch.finfo(values.dtype)
        return 4 * numbers.eps, numbers.tiny * numbers.eps

    def cost(self, shape: BucketShape, world_size: int, rank: int = 0, node: int = 1) -> Cost:
        collective = _collective(self, shape, world_size)
        nbytes = nbytes_of(_vectors(self, shape))
        return Cost(collective, nbytes, _load(self, collective, shape, world_size, rank, node))

    def prepare(self, bucket: Prepared) -> None:
        shape, exchange = bucket.shape, bucket.exchange
        collective = _collective(self, shape, exchange.world_size)
        if collective == "sharded":
            up, down = _directions(self, shape, exchange.world_size)
            # No slot for a server residual: the downlink is dense, so it leaves nothing unsent.
            bucket.route = ShardedRoute(bucket, up, down, down.shape.dtype)
        else:
            # Messages that are added have no frames, and so no checksums.
            framed = collective == "allgather"
            checksum = framed and exchange.checksum
            codec = Codec(_vectors(self, shape), bucket.device, shape.dtype, None, checksum)
            bucket.route = (AllGatherRoute if framed else AllReduceRoute)(codec, exchange)


def _vectors(method: OneWay, shape: BucketShape) -> tuple[Vector, ...]:
    return vectors_of(method.compressor, shape.names, shape.sizes, shape.dtype)


# Cached because `explain` asks for it many times, and computing it takes milliseconds.
@lru_cache(maxsize=4096)
def _collective(method: OneWay, shape: BucketShape, world_size: int) -> str:
    if method.exchange != "auto":
        return method.exchange
    if method.compressor.summable:
        return "allreduce"
    if not _divisible(method.compressor):
        return "allgather"
    # Compare the load of rank 0 on every rank: all ranks must choose the same collective.
    received = {
        each: _load(method, each, shape, world_size).received for each in ("allgather", "sharded")
    }
    return min(received, key=received.__getitem__)


def _load(
    method: OneWay,
    collective: str,
    shape: BucketShape,
    world_size: int,
    rank: int = 0,
    node: int = 1,
) -> Load:
    if collective == "sharded":
        return sharded_load(*_directions(method, shape, world_size), rank, node)
    nbytes = nbytes_of(_vectors(method, shape))
    if collective == "allreduce":
        return Load(summed=nbytes)
    moved = gathered(wire.framed(nbytes), world_size, node)
    return Load(sent=moved, received=moved)


@lru_cache(maxsize=1024)
def _directions(method: OneWay, shape: BucketShape, world_size: int) -> tuple[Direction, Direction]:
    # Owners send the mean in the dtype of their sum. It is rounded to the gradient's dtype only
    # after the exchange, where a residual can record the error (`write_mean`).
    dtype = torch.promote_types(shape.dtype, method.sum_dtype(shape.dtype))
    wide = BucketShape(shape.names, shape.shapes, dtype, shape.strides)
    return (
        direction("up", method.compressor, "exact", shape, world_size),
        direction("down", _DENSE, "exact", wide, world_size),
    )


def _divisible(compressor: Compressor) -> bool:
    return compressor.selects or compressor.elementwise
