"""DGC: deep gradient compression. Every rank applies momentum before it selects entries."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from torchcomp.aggregators.base import Law, Residual, ResidualDtype
from torchcomp.aggregators.one_way import OneWay
from torchcomp.engine.bucket import BucketShape
from torchcomp.engine.keys import Key
from torchcomp.engine.prepared import Prepared
from torchcomp.engine.state import Kind, Slot
from torchcomp.specs.checks import check_flag, check_momentum
from torchcomp.specs.errors import SpecError


@dataclass(frozen=True)
class DGC(Residual, OneWay):
    """``dgc(topk(0.05), momentum=0.9)``: error feedback with momentum, for SGD.

    Let g be the gradient of this rank, u its velocity and v its residual. Both start at 0.

    1. u <- momentum u + g                  (momentum correction)
    2. v <- v + u                           (with nesterov: v + momentum u + g)
    3. message = top entries of v
    4. v <- v - message;  u <- 0 where an entry was sent     (momentum factor masking)
    5. g <- mean of all messages            (v also keeps the error of rounding to g's dtype)

    The method applies the momentum, so use SGD without momentum as the optimizer, whose weight
    decay then has none. The paper's local gradient clipping is not included: clip the averaged
    gradient after the backward pass instead.

    The paper's warm-up is ``dgc(warmup(C, steps=100, start=0.25))``. One that begins dense is
    refused: step 4 would set every u to 0.

    Nothing is lost, up to the rounding of v's dtype: the sum of all applied means plus the mean v
    equals the sum of what step 2 adds to v, in the mean. With momentum=0 this is ``ef``.

    Reference: Lin, Han, Mao, Wang, Dally, "Deep gradient compression: Reducing the communication
    bandwidth for distributed training", ICLR 2018.

    ``exchange`` is that of OneWay.

    Attributes:
        compressor: selects entries by magnitude, such as topk.
        momentum: at least 0 and below 1.
        nesterov: Nesterov's momentum, as in torch.optim.SGD.
        memory_dtype: dtype of u and v; see Residual.
    """

    name: ClassVar[str] = "dgc"
    example: ClassVar[str] = "dgc(topk(0.05), momentum=0.9)"

    momentum: float = 0.9
    nesterov: bool = False
    memory_dtype: ResidualDtype = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_momentum("momentum", self.momentum, owner=self.name)
        check_flag("nesterov", self.nesterov, owner=self.name)
        if not self.compressor.at(0).selects:
            raise SpecError(
                "dgc masks the momentum of the entries that a rank selects by magnitude, and "
                f"{self.compressor} selects none, or not from the start: use topk, or a warm-up "
                "such as warmup(topk(0.05), steps=100, start=0.25)",
                "compressor",
            )

    def slots(self, shape: BucketShape, world_size: int, rank: int) -> tuple[Slot, ...]:
        error = self.error_slot(shape)
        # ESTIMATE, because u is not unsent gradient: step 2 has already added it to v.
        return error, replace(error, name="momentum", kind=Kind.ESTIMATE)

    def law(self, shape: BucketShape) -> Law:
        # What enters v is the velocity of step 2, written with the u before the step.
        u, gradient = self.momentum, 1.0
        if self.nesterov:
            u, gradient = self.momentum**2, 1 + self.momentum
        law = super().law(shape)
        return replace(law, gradient=gradient, before={**law.before, "momentum": -u})

    def aggregate(self, g: Tensor, bucket: Prepared, key: Key) -> None:
        v, v_next = bucket.open("error")
        u, u_next = bucket.open("momentum")
        torch.add(g, u, alpha=self.momentum, out=u_next)  # step 1
        # Step 2 without g, which `send_sum` adds in the same pass as it selects entries.
        without_g = torch.add(v, u_next if self.nesterov else u, alpha=self.momentum)
        route = bucket.route
        route.send_sum(g, without_g, v_next, key)  # steps 2 and 3, and step 4 for v
        # Step 4, for u. `without_g` is no longer needed: reuse it for the sent entries.
        route.sent(without_g.zero_())
        u_next.masked_fill_(without_g != 0, 0.0)
        bucket.write_mean(g, v_next)  # step 5
