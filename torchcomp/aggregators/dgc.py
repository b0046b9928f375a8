"""DGC: deep gradient compression. Momentum is applied before selection, on every rank."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from torchcomp.aggregators.one_way import OneWay
from torchcomp.aggregators.residual import Residual, check_contractive, write_mean
from torchcomp.bucket import Bucket, BucketShape
from torchcomp.checks import check_count, check_flag, check_momentum
from torchcomp.compressors.sparse import Sparsifier
from torchcomp.errors import SpecError
from torchcomp.exchange import Exchange
from torchcomp.keys import Key
from torchcomp.state import Kind, Slot, State


@dataclass(frozen=True)
class DGC(Residual, OneWay):
    """``dgc(topk(0.05), momentum=0.9)``: error feedback that sums velocities, not gradients.

    With u the velocity and v the residual of this rank (both 0 at the start), g its gradient:

    1. u <- momentum u + g                  (momentum correction)
    2. v <- v + u                           (with nesterov: v + momentum u + g)
    3. message = top entries of v
    4. v <- v - message;  u <- 0 where an entry was sent     (momentum factor masking)
    5. g <- mean of all messages            (plus: v takes up what rounding to g's dtype loses)

    The momentum is in here, so the optimizer must be SGD without momentum. Its weight decay then
    has none. The paper's local gradient clipping needs the norm of the whole gradient, which no
    bucket has: clip what is applied, after the backward pass.

    During `warmup_steps` steps a quarter of the entries is sent, then a sixteenth, and so on down
    to the compressor's share, in stages of equal length. ``explain`` tells the steps after it.

    The sum of all applied means plus the mean v equals the sum of all mean velocities (what is
    added to v in step 2), up to the rounding of v's dtype. With momentum=0 this is ``ef``.

    Reference: Lin, Han, Mao, Wang, Dally, "Deep gradient compression: Reducing the communication
    bandwidth for distributed training", ICLR 2018.

    Attributes:
        compressor: one that selects, such as topk.
        exchange: "allgather", "sharded" or "auto" (see OneWay).
        momentum: from 0 to below 1.
        nesterov: Nesterov's momentum, as in torch.optim.SGD.
        warmup_steps: steps until the compressor's own share is reached; counted from the start.
        memory_dtype: dtype of u and v, as in ``ef``.
    """

    name: ClassVar[str] = "dgc"
    example: ClassVar[str] = "dgc(topk(0.05), momentum=0.9)"

    momentum: float = 0.9
    nesterov: bool = False
    warmup_steps: int = 0
    memory_dtype: str | None = None

    def __post_init__(self) -> None:
        OneWay.__post_init__(self)
        check_momentum("momentum", self.momentum, owner=self.name)
        check_flag("nesterov", self.nesterov, owner=self.name)
        check_count("warmup_steps", self.warmup_steps, least=0, owner=self.name)
        check_contractive(self, "compressor")
        Residual.__post_init__(self)
        if not self.compressor.selects:
            raise SpecError(
                "dgc masks the momentum of the entries that a rank selects to send, and "
                f"{self.compressor} does not select by magnitude: take topk",
                "compressor",
            )
        if self.warmup_steps and getattr(self.compressor, "ratio", None) is None:
            raise SpecError(
                "dgc: a warm-up ends at a share of the entries, topk(0.05), not at a count",
                "warmup_steps",
            )

    def sum_dtype(self, gradient: torch.dtype) -> torch.dtype:
        return self.residual_dtype(gradient)

    def traces(self, dtype: torch.dtype) -> bool:
        return self.shows(self.compressor, dtype)

    def slots(self, shape: BucketShape, world_size: int, rank: int) -> tuple[Slot, ...]:
        error = self.error_slot(shape)
        return (error, replace(error, name="momentum", kind=Kind.ESTIMATE))

    def aggregate(self, bucket: Bucket, exchange: Exchange, state: State, key: Key) -> None:
        g = bucket.flat
        error, momentum = self.slots(bucket.shape, exchange.world_size, exchange.rank)
        v, v_next = state.open(error, g.device)
        u, u_next = state.open(momentum, g.device)
        torch.add(g, u, alpha=self.momentum, out=u_next)
        owed = torch.add(v, u_next if self.nesterov else u, alpha=self.momentum)
        route = self._stage(key.step).route(bucket.shape, exchange, state, key)
        route.send_sum(g, owed, v_next)
        route.sent(v_next, -1.0)
        route.sent(owed.zero_())
        u_next.masked_fill_(owed != 0, 0.0)
        write_mean(route, g, v_next)

    def _stage(self, step: int) -> "DGC":
        """This method with the share that it sends in a step of the warm-up."""
        if step >= self.warmup_steps or not isinstance(self.compressor, Sparsifier):
            return self
        stages = math.ceil(-math.log2(self.compressor.ratio or 1.0) / 2) - 1
        if stages < 1:
            return self
        ratio = 0.25 ** (1 + step * stages // self.warmup_steps)
        return replace(self, compressor=replace(self.compressor, ratio=ratio), warmup_steps=0)
