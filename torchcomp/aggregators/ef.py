"""EF: error feedback. What was not sent is added to the next gradient."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from torchcomp.aggregators.one_way import OneWay
from torchcomp.aggregators.residual import Residual, check_contractive, write_mean
from torchcomp.bucket import Bucket, BucketShape
from torchcomp.exchange import Exchange
from torchcomp.keys import Key
from torchcomp.state import Slot, State


@dataclass(frozen=True)
class EF(Residual, OneWay):
    """``ef(C)``: error feedback around a contractive compressor C.

    With e the residual of this rank (0 at the start) and g its gradient:

    1. x = g + e
    2. message = C(x)
    3. e <- x - message              (what was not sent stays)
    4. g <- mean of all messages     (plus: e takes up what rounding the mean to g's dtype loses)

    Nothing is lost: the sum of all applied means plus the mean residual equals the sum of all mean
    gradients, up to the rounding of the residual's dtype. The exception are 16-bit values that are
    summed on the way, by ``cast`` or of 16-bit gradients: every hop rounds, and no residual sees
    it; ``exchange="allgather"`` conserves them as well.

    References: Seide et al., "1-bit SGD", Interspeech 2014; Karimireddy et al., "Error feedback
    fixes SignSGD", ICML 2019 (here the learning rate stays outside the residual, so that any
    optimizer may follow).

    Attributes:
        compressor: must be contractive.
        exchange: "allreduce", "allgather", "sharded" or "auto" (see OneWay).
        memory_dtype: dtype of the residual (see Residual).
    """

    name: ClassVar[str] = "ef"
    example: ClassVar[str] = "ef(topk(0.01))"

    memory_dtype: str | None = None

    def __post_init__(self) -> None:
        OneWay.__post_init__(self)
        check_contractive(self, "compressor")
        Residual.__post_init__(self)

    def sum_dtype(self, gradient: torch.dtype) -> torch.dtype:
        return self.residual_dtype(gradient)

    def traces(self, dtype: torch.dtype) -> bool:
        return self.shows(self.compressor, dtype)

    def slots(self, shape: BucketShape, world_size: int, rank: int) -> tuple[Slot, ...]:
        return (self.error_slot(shape),)

    def aggregate(self, bucket: Bucket, exchange: Exchange, state: State, key: Key) -> None:
        g = bucket.flat
        e, x = state.open(self.error_slot(bucket.shape), g.device)
        route = self.route(bucket.shape, exchange, state, key)
        route.send_sum(g, e, x)
        route.sent(x, -1.0)
        write_mean(route, g, x)
