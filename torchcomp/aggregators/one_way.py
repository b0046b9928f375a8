"""OneWay: what all aggregators share that compress what ranks send, but not what they get back."""

from dataclasses import dataclass
from functools import lru_cache

import torch

from torchcomp.aggregators.base import Aggregator, Cost
from torchcomp.bucket import BucketShape
from torchcomp.checks import check_choice
from torchcomp.codec import codec
from torchcomp.component import check_kind
from torchcomp.compressors import Compressor, Identity
from torchcomp.errors import SpecError
from torchcomp.exchange import Exchange
from torchcomp.keys import Key
from torchcomp.routes import AllGatherRoute, AllReduceRoute, Route, ShardedRoute
from torchcomp.routes.sharded import Direction, direction, sharded_load
from torchcomp.state import State
from torchcomp.traffic import Load

COLLECTIVES = ("auto", "allreduce", "allgather", "sharded")
_FORMER = {"sum": "allreduce", "gather": "allgather"}
_DENSE = Identity()


@dataclass(frozen=True)
class OneWay(Aggregator):
    """A compressor and the route that its messages take.

    Attributes:
        compressor: applied to what a rank sends.
        exchange: "allreduce", "allgather", "sharded", or "auto": allreduce where messages can be
            added, else allgather or sharded, whichever moves fewer bytes. The result is the same.
            ("sum" and "gather" are the former words for the first two.)
    """

    compressor: Compressor
    exchange: str = "auto"

    def __post_init__(self) -> None:
        check_kind(self, "compressor", Compressor)
        if isinstance(self.exchange, str):
            object.__setattr__(self, "exchange", _FORMER.get(self.exchange, self.exchange))
        check_choice("exchange", self.exchange, COLLECTIVES, owner=self.name)
        if self.exchange == "allreduce" and not self.compressor.summable:
            raise SpecError(
                f"allreduce needs one support on all ranks; {self.compressor.name} selects per "
                'rank: use exchange="allgather" or "sharded"',
                "exchange",
            )
        if self.exchange == "sharded" and not _divisible(self.compressor):
            raise SpecError(
                f"sharded divides a message among the owners of shards, and {self.compressor.name} "
                'makes one for the whole bucket: use exchange="allgather" or "allreduce"',
                "exchange",
            )

    @property
    def whole_model(self) -> bool:
        return self.compressor.whole_model

    def sum_dtype(self, gradient: torch.dtype) -> torch.dtype:
        """Dtype in which means are added up, for gradients of a dtype."""
        return gradient

    def cost(self, shape: BucketShape, world_size: int, rank: int = 0) -> Cost:
        collective = _collective(self, shape, world_size)
        nbytes = codec(self.compressor, shape.names, shape.sizes, shape.dtype).nbytes
        return Cost(collective, nbytes, _load(self, collective, shape, world_size, rank))

    def route(self, shape: BucketShape, exchange: Exchange, state: State, key: Key) -> Route:
        """A bucket's way through this aggregator's compressor and collective."""
        collective = _collective(self, shape, exchange.world_size)
        if collective == "sharded":
            up, down = _directions(self, shape, exchange.world_size)
            return ShardedRoute(up, down, exchange, key, state, down.shape.dtype)
        encoder = codec(self.compressor, shape.names, shape.sizes, shape.dtype)
        if collective == "allreduce":
            return AllReduceRoute(encoder, exchange, key)
        scratch = state.scratch((self, shape), encoder.scratch)
        return AllGatherRoute(encoder, exchange, key, scratch)


# Kept, because it is asked for every bucket of every step, and takes milliseconds to find out.
@lru_cache(maxsize=4096)
def _collective(method: OneWay, shape: BucketShape, world_size: int) -> str:
    if method.exchange != "auto":
        return method.exchange
    if method.compressor.summable:
        return "allreduce"
    if not _divisible(method.compressor):
        return "allgather"
    received = {
        each: _load(method, each, shape, world_size, 0).received
        for each in ("allgather", "sharded")
    }
    return min(received, key=received.__getitem__)


def _load(method: OneWay, collective: str, shape: BucketShape, world_size: int, rank: int) -> Load:
    if collective == "sharded":
        return sharded_load(*_directions(method, shape, world_size), rank)
    encoder = codec(method.compressor, shape.names, shape.sizes, shape.dtype)
    if collective == "allreduce":
        return Load(summed=encoder.nbytes)
    moved = encoder.framed * (world_size - 1)
    return Load(sent=moved, received=moved)


@lru_cache(maxsize=1024)
def _directions(method: OneWay, shape: BucketShape, world_size: int) -> tuple[Direction, Direction]:
    dtype = torch.promote_types(shape.dtype, method.sum_dtype(shape.dtype))
    wide = BucketShape(shape.names, shape.shapes, dtype, shape.strides)
    return (
        direction("up", method.compressor, "exact", shape, world_size),
        direction("down", _DENSE, "exact", wide, world_size),
    )


def _divisible(compressor: Compressor) -> bool:
    return compressor.selects or compressor.elementwise
