"""DGC: deep gradient compression. Every rank applies momentum before it selects entries."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from torchcomp.aggregators.one_way import OneWay
from torchcomp.aggregators.residual import (
    Residual,
    ResidualDtype,
    check_contractive,
    write_mean,
)
from torchcomp.bucket import Bucket, BucketShape
from torchcomp.checks import check_count, check_flag, check_momentum
from torchcomp.compressors.sparse import Sparsifier
from torchcomp.errors import SpecError
from torchcomp.exchange import Exchange
from torchcomp.keys import Key
from torchcomp.state import Kind, Slot, State


@dataclass(frozen=True)
class DGC(Residual, OneWay):
    """``dgc(topk(0.05), momentum=0.9)``: error feedback with momentum, for SGD.

    Let g be the gradient of this rank, u its velocity and v its residual. Both start at 0.

    1. u <- momentum u + g                  (momentum correction)
    2. v <- v + u                           (with nesterov: v + momentum u + g)
    3. message = top entries of v
    4. v <- v - message;  u <- 0 where an entry was sent     (momentum factor masking)
    5. g <- mean of all messages            (v also keeps the error of rounding to g's dtype)

    The method applies the momentum, so use SGD without momentum as the optimizer. The weight decay
    of that optimizer then has no momentum. The paper's local gradient clipping is not included: it
    needs the norm of the whole gradient, and a bucket is only a part. Clip the averaged gradient
    after the backward pass instead.

    The first `warmup_steps` steps send more: first a quarter of the entries, then a sixteenth, and
    further powers of 1/4 down to the compressor's ratio. All stages have the same length.
    ``explain`` reports the steps after the warm-up.

    Nothing is lost, up to the rounding of v's dtype: the sum of all applied means plus the mean v
    equals the sum of all mean velocities. Here, a velocity is what step 2 adds to v. With
    momentum=0 this is ``ef``.

    Reference: Lin, Han, Mao, Wang, Dally, "Deep gradient compression: Reducing the communication
    bandwidth for distributed training", ICLR 2018.

    ``exchange`` is that of OneWay.

    Attributes:
        compressor: selects entries by magnitude, such as topk.
        momentum: at least 0 and below 1.
        nesterov: Nesterov's momentum, as in torch.optim.SGD.
        warmup_steps: number of steps, from the start of training, until the compressor's ratio is
            reached.
        memory_dtype: dtype of u and v. The default is fp32, or the gradient's dtype if that is
            wider.
    """

    name: ClassVar[str] = "dgc"
    example: ClassVar[str] = "dgc(topk(0.05), momentum=0.9)"

    momentum: float = 0.9
    nesterov: bool = False
    warmup_steps: int = 0
    memory_dtype: ResidualDtype = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_momentum("momentum", self.momentum, owner=self.name)
        check_flag("nesterov", self.nesterov, owner=self.name)
        check_count("warmup_steps", self.warmup_steps, least=0, owner=self.name)
        check_contractive(self, "compressor")
        if not self.compressor.selects:
            raise SpecError(
                f"dgc cannot use {self.compressor}, which does not select entries by magnitude: "
                "dgc masks the momentum of the entries that a rank selects. Use topk",
                "compressor",
            )
        if self.warmup_steps and getattr(self.compressor, "ratio", None) is None:
            raise SpecError(
                f"dgc: warmup_steps={self.warmup_steps} needs a compressor with a ratio, such as "
                f"topk(0.05), and {self.compressor} has a count",
                "warmup_steps",
            )

    def sum_dtype(self, gradient: torch.dtype) -> torch.dtype:
        return self.residual_dtype(gradient)

    def residual_shows_nonfinite(self, dtype: torch.dtype) -> bool:
        return self.shows(self.compressor, dtype)

    def slots(self, shape: BucketShape, world_size: int, rank: int) -> tuple[Slot, ...]:
        error = self.error_slot(shape)
        # ESTIMATE, because u is not unsent gradient: step 2 has already added it to v.
        return (error, replace(error, name="momentum", kind=Kind.ESTIMATE))

    def aggregate(self, bucket: Bucket, exchange: Exchange, state: State, key: Key) -> None:
        g = bucket.flat
        error, momentum = self.slots(bucket.shape, exchange.world_size, exchange.rank)
        v, v_next = state.open(error, g.device)
        u, u_next = state.open(momentum, g.device)
        torch.add(g, u, alpha=self.momentum, out=u_next)  # step 1
        # Step 2 without g, which `send_sum` adds in the same pass as it selects entries.
        without_g = torch.add(v, u_next if self.nesterov else u, alpha=self.momentum)
        route = self._stage(key.step).route(bucket.shape, exchange, state, key)
        route.send_sum(g, without_g, v_next)  # steps 2 and 3
        route.sent(v_next, -1.0)  # step 4, for v
        # Step 4, for u. `without_g` is no longer needed: reuse it for the sent entries.
        route.sent(without_g.zero_())
        u_next.masked_fill_(without_g != 0, 0.0)
        write_mean(route, g, v_next)  # step 5

    def _stage(self, step: int) -> "DGC":
        """Return this method with the ratio of a warm-up step."""
        if step >= self.warmup_steps or not isinstance(self.compressor, Sparsifier):
            return self
        # The number of powers of 1/4 that are larger than the final ratio.
        stages = math.ceil(-math.log2(self.compressor.ratio or 1.0) / 2) - 1
        if stages < 1:
            return self
        ratio = 0.25 ** (1 + step * stages // self.warmup_steps)
        return replace(self, compressor=replace(self.compressor, ratio=ratio), warmup_steps=0)
