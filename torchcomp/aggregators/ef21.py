"""EF21: every rank sends what its gradient has moved by, and keeps an estimate of it."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from torchcomp.aggregators.one_way import OneWay
from torchcomp.aggregators.residual import check_contractive
from torchcomp.bucket import Bucket, BucketShape
from torchcomp.exchange import Exchange
from torchcomp.kernels.cast import narrow
from torchcomp.keys import Key
from torchcomp.state import Kind, Slot, State


@dataclass(frozen=True)
class EF21(OneWay):
    """``ef21(C)``: error feedback by estimates, around a contractive compressor C.

    With s the estimate of this rank's gradient g, and m the mean of all ranks' s (both 0 at the
    start, so the first steps are too short while s grows to the size of g):

    1. message = C(g - s)
    2. s <- s + message
    3. m <- m + mean of all messages
    4. g <- m

    What it keeps: m is the mean of all s, up to the rounding of float32 and of 16-bit values that
    are summed on the way. What it does not keep: the sum of all gradients. A gradient that s never
    reached is not sent later, and there is no residual. A step without a gradient sends C(-s).

    Reference: Richtárik, Sokolov, Fatkhullin, "EF21: A new, simpler, theoretically better, and
    practically faster error feedback", NeurIPS 2021.

    Attributes:
        compressor: must be contractive.
        exchange: "allreduce", "allgather", "sharded" or "auto" (see OneWay).
    """

    name: ClassVar[str] = "ef21"
    example: ClassVar[str] = "ef21(topk(0.05))"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_contractive(self, "compressor")

    def sum_dtype(self, gradient: torch.dtype) -> torch.dtype:
        return torch.promote_types(gradient, torch.float32)

    def slots(self, shape: BucketShape, world_size: int, rank: int) -> tuple[Slot, ...]:
        dtype = shape.wide().dtype
        return (
            Slot("estimate", Kind.ESTIMATE, shape.names, shape.sizes, dtype),
            Slot("mean_estimate", Kind.ESTIMATE, shape.names, shape.sizes, dtype),
        )

    def aggregate(self, bucket: Bucket, exchange: Exchange, state: State, key: Key) -> None:
        g = bucket.flat
        own, mean = self.slots(bucket.shape, exchange.world_size, exchange.rank)
        s, s_next = state.open(own, g.device)
        m, m_next = state.open(mean, g.device)
        route = self.route(bucket.shape, exchange, state, key)
        # m_next is free until the mean arrives: it holds the difference that is compressed.
        route.send_sum(g, torch.neg(s, out=s_next), m_next)
        s_next.copy_(s)
        route.sent(s_next)
        route.mean(m_next)
        narrow(m_next.add_(m), g.dtype, g)
