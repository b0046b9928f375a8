"""Mean and EF, and OneWay: the base of methods that compress what ranks send, but not the mean."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from torchcomp.aggregators.base import Aggregator, Cost, Law, Residual, ResidualDtype
from torchcomp.compressors import Compressor, Identity
from torchcomp.engine.bucket import BucketShape
from torchcomp.engine.keys import Key
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
        able = {"allreduce": self.compressor.summable, "sharded": self._divisible}
        if not able.get(self.exchange, True):
            how = "added" if self.exchange == "allreduce" else "divided among the owners of shards"
            raise SpecError(
                f'{self.name}: exchange="{self.exchange}" needs messages that can be {how}, and '
                f'those of {self.compressor.name} cannot. Use exchange="auto"',
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
        nbytes = nbytes_of(vectors_of(self.compressor, shape.names, shape.sizes, shape.dtype))
        if collective == "allreduce":
            load = Load(summed=nbytes)
        elif collective == "sharded":
            load = sharded_load(*_directions(self, shape, world_size), rank, node)
        else:
            moved = gathered(wire.framed(nbytes), world_size, node)
            load = Load(sent=moved, received=moved)
        return Cost(collective, nbytes, load)

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
            vectors = vectors_of(self.compressor, shape.names, shape.sizes, shape.dtype)
            checksum = framed and exchange.checksum
            codec = Codec(vectors, bucket.device, shape.dtype, None, checksum)
            bucket.route = (AllGatherRoute if framed else AllReduceRoute)(codec, exchange)

    @property
    def _divisible(self) -> bool:
        return self.compressor.selects or self.compressor.elementwise


# Cached because `explain` asks for it many times, and computing it takes milliseconds.
@lru_cache(maxsize=4096)
def _collective(method: OneWay, shape: BucketShape, world_size: int) -> str:
    if method.exchange != "auto":
        return method.exchange
    if method.compressor.summable:
        return "allreduce"
    if not method._divisible:
        return "allgather"
    # Compare the load of rank 0 on every rank: all ranks must choose the same collective.
    both = (replace(method, exchange=each) for each in ("allgather", "sharded"))
    return min(both, key=lambda way: way.cost(shape, world_size).load.received).exchange


@lru_cache(maxsize=1024)
def _directions(method: OneWay, shape: BucketShape, world_size: int) -> tuple[Direction, Direction]:
    # Owners send the mean in the dtype of their sum. It is rounded to the gradient's dtype only
    # after the exchange, where a residual can record the error (`write_mean`).
    dtype = torch.promote_types(shape.dtype, method.sum_dtype(shape.dtype))
    wide = replace(shape, dtype=dtype)
    return (
        direction("up", method.compressor, "exact", shape, world_size),
        direction("down", _DENSE, "exact", wide, world_size),
    )


@dataclass(frozen=True)
class Mean(OneWay):
    """``mean``: do what plain DDP does.

    ``mean(C)``, or ``C`` for short, averages C(gradient).

    1. message = C(g)
    2. g <- mean of the decoded messages

    What C does not send is lost. Wrap a biased C (topk, randk) in ``ef`` instead. The options are
    those of OneWay.
    """

    name: ClassVar[str] = "mean"

    compressor: Compressor = _DENSE

    @property
    def loses(self) -> bool:
        """Whether the method permanently drops a large part of the gradient."""
        large = 10**6  # elements of a realistic bucket
        alpha = self.compressor.alpha(large)
        return self.compressor.omega(large) is None and (alpha is None or alpha < 0.5)

    @property
    def depends_on_grouping(self) -> bool:
        # An all-reduce over DDP's own buckets adds in the same order as plain DDP, bit for bit.
        return not (self.compressor.elementwise and self.exchange in ("auto", "allreduce"))

    @property
    def transparent(self) -> bool:
        return isinstance(self.compressor, Identity)

    def law(self, shape: BucketShape) -> Law:
        alpha, omega = self.compressor.alpha(shape.numel), self.compressor.omega(shape.numel)
        # An unbiased compressor has a bound only on the expectation.
        bounds = [] if alpha is None else [math.sqrt(1 - alpha)]
        bounds += [] if omega is None else [3 * math.sqrt(omega)]
        rounding, smallest = self.sum_rounding(shape)
        error = min(bounds, default=math.inf) + rounding
        return Law(error=error, per_parameter=self.compressor.elementwise, smallest=smallest)

    def aggregate(self, g: Tensor, bucket: Prepared, key: Key) -> None:
        bucket.route.send(g, key)  # step 1
        bucket.route.mean(g)  # step 2


@dataclass(frozen=True)
class EF(Residual, OneWay):
    """``ef(topk(0.01))``: error feedback around a compressor.

    C is the compressor. Let g be the gradient of this rank and e its residual, which starts at 0.

    1. x = g + e
    2. message = C(x)
    3. e <- x - message              (what was not sent)
    4. g <- mean of all messages     (e also keeps the error of rounding the mean to g's dtype)

    Nothing is lost, up to the rounding of the residual's dtype: the sum of all applied means plus
    the mean residual equals the sum of all mean gradients. But all-reduces of 16-bit values round
    at every hop, which no residual records: ``exchange="allgather"`` conserves these as well.

    References: Seide et al., "1-bit SGD", Interspeech 2014; Karimireddy et al., "Error feedback
    fixes SignSGD", ICML 2019. By default, the residual does not include the learning rate, so any
    optimizer works. ``torchcomp.register(..., lr_inside=optimizer)`` includes it, as in the latter.

    The other options are those of OneWay and Residual.

    Attributes:
        compressor: C, applied to what a rank sends; contractive, such as topk(0.01).
    """

    name: ClassVar[str] = "ef"
    example: ClassVar[str] = "ef(topk(0.01))"

    memory_dtype: ResidualDtype = None

    def law(self, shape: BucketShape) -> Law:
        error, smallest = self.sum_rounding(shape)
        return replace(super().law(shape), error=error, smallest=smallest)

    def aggregate(self, g: Tensor, bucket: Prepared, key: Key) -> None:
        e, e_next = bucket.open("error")
        bucket.route.send_sum(g, e, e_next, key)  # steps 1 to 3
        bucket.write_mean(g, e_next)  # step 4
