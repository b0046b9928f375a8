"""OneWay: what all aggregators share that compress what ranks send, but not what they get back."""

from dataclasses import dataclass

import torch

from torchcomp.aggregators.base import Aggregator, Shape
from torchcomp.aggregators.sharded import Plan, ShardedTransfer, plan, sharded_load
from torchcomp.aggregators.transfer import GatherTransfer, SumTransfer, Transfer
from torchcomp.bucket import Bucket
from torchcomp.checks import check_choice
from torchcomp.codec import codec
from torchcomp.component import check_kind
from torchcomp.compressors import Compressor, Identity
from torchcomp.errors import SpecError
from torchcomp.exchange import Exchange
from torchcomp.keys import Key
from torchcomp.state import State
from torchcomp.traffic import Load, gather_bytes

EXCHANGES = ("auto", "gather", "sum", "sharded")
_DENSE = Identity()


@dataclass(frozen=True)
class OneWay(Aggregator):
    """A compressor and the route that its messages take.

    Attributes:
        compressor: applied to what a rank sends.
        exchange: "sum", "gather", "sharded", or "auto": sum where messages can be added, else
            gather or sharded, whichever moves fewer bytes. The result is the same.
    """

    compressor: Compressor
    exchange: str = "auto"

    def __post_init__(self) -> None:
        check_kind(self, "compressor", Compressor)
        check_choice("exchange", self.exchange, EXCHANGES, owner=self.name)
        if self.exchange == "sum" and not self.compressor.summable:
            raise SpecError(
                f"sum needs one support on all ranks; {self.compressor.name} selects per rank: "
                'use exchange="gather" or "sharded"',
                "exchange",
            )
        if self.exchange == "sharded" and not _divisible(self.compressor):
            raise SpecError(
                f"sharded divides a message among the owners of shards, and {self.compressor.name} "
                'makes one for the whole bucket: use exchange="gather" or "sum"',
                "exchange",
            )

    @property
    def whole_model(self) -> bool:
        return self.compressor.whole_model

    def memory_dtype_of(self, gradient: torch.dtype) -> torch.dtype:
        """Dtype in which means are added up, for gradients of a dtype."""
        return gradient

    def route(self, shape: Shape, world_size: int) -> str:
        if self.exchange != "auto":
            return self.exchange
        if self.compressor.summable:
            return "sum"
        if not _divisible(self.compressor):
            return "gather"
        gathered = self._load_by("gather", shape, world_size, 0).received
        return min(
            ("gather", gathered),
            ("sharded", self._load_by("sharded", shape, world_size, 0).received),
            key=lambda route: route[1],
        )[0]

    def message_bytes(self, shape: Shape) -> int:
        return codec(self.compressor, *shape).nbytes

    def load(self, shape: Shape, world_size: int, rank: int) -> Load:
        return self._load_by(self.route(shape, world_size), shape, world_size, rank)

    def memory_bytes(self, numel: int, dtype: torch.dtype, world_size: int) -> int:
        return 0

    def transfer(self, bucket: Bucket, exchange: Exchange, state: State, key: Key) -> Transfer:
        """The bucket's way through this aggregator's compressor and route."""
        shape = (bucket.names, bucket.sizes, bucket.flat.dtype)
        route = self.route(shape, exchange.world_size)
        encoder = codec(self.compressor, *shape)
        if route == "sum":
            return SumTransfer(encoder, exchange, key)
        if route == "gather":
            warm = state.warm("gather", bucket.names, len(encoder.vectors))
            return GatherTransfer(encoder, exchange, key, warm)
        up, down = self._plans(shape, exchange.world_size)
        return ShardedTransfer(up, down, exchange, key, state, down.dtype, remembers=False)

    def _load_by(self, route: str, shape: Shape, world_size: int, rank: int) -> Load:
        if route == "sum":
            return Load(summed=self.message_bytes(shape))
        if route == "gather":
            moved = gather_bytes(codec(self.compressor, *shape).framed, world_size)
            return Load(sent=moved, received=moved)
        return sharded_load(*self._plans(shape, world_size), rank)

    def _plans(self, shape: Shape, world_size: int) -> tuple[Plan, Plan]:
        names, sizes, dtype = shape
        wide = torch.promote_types(dtype, self.memory_dtype_of(dtype))
        return (
            plan("up", self.compressor, "exact", names, sizes, dtype, world_size),
            plan("down", _DENSE, "exact", names, sizes, wide, world_size),
        )


def _divisible(compressor: Compressor) -> bool:
    return compressor.selects or compressor.elementwise
