"""DGC: deep gradient compression. Every rank applies momentum before it selects entries."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from torchcomp.aggregators.base import Law
from torchcomp.aggregators.one_way import OneWay
from torchcomp.aggregators.residual import Residual, ResidualDtype
from torchcomp.compressors import Compressor, Warmup
from torchcomp.engine.bucket import BucketShape
from torchcomp.engine.keys import Key
from torchcomp.engine.prepared import Prepared
from torchcomp.engine.state import Kind, Slot
from torchcomp.specs.checks import check_count, check_flag, check_momentum
from torchcomp.specs.errors import SpecError

_START = 0.25  # the paper's first ratio


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

    ``dgc(C, warmup_steps=100)`` is short for ``dgc(warmup(C, steps=100, start=0.25))``, as in the
    paper. A warm-up that begins dense is refused: step 4 would set every u to 0.

    Nothing is lost, up to the rounding of v's dtype: the sum of all applied means plus the mean v
    equals the sum of what step 2 adds to v, in the mean. With momentum=0 this is ``ef``.

    Reference: Lin, Han, Mao, Wang, Dally, "Deep gradient compression: Reducing the communication
    bandwidth for distributed training", ICLR 2018.

    ``exchange`` is that of OneWay.

    Attributes:
        compressor: selects entries by magnitude, such as topk.
        momentum: at least 0 and below 1.
        nesterov: Nesterov's momentum, as in torch.optim.SGD.
        warmup_steps: first steps, which send more.
        memory_dtype: dtype of u and v; see Residual.
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
        if not self.compressor.at(0).selects:
            dense = " in its first stage" if self.compressor.selects else ""
            advice = "a start below 1, such as warmup(topk(0.05), steps=100, start=0.25)"
            raise SpecError(
                f"dgc cannot use {self.compressor}, which does not select entries by magnitude"
                f"{dense}: dgc masks the momentum of the entries that a rank selects. Use "
                f"{advice if dense else 'topk'}",
                "compressor",
            )
        warmed_up = isinstance(self.compressor, Warmup)
        if self.warmup_steps and (warmed_up or getattr(self.compressor, "ratio", None) is None):
            raise SpecError(
                f"dgc: warmup_steps={self.warmup_steps} is short for a warmup(...) of a compressor "
                f"with a ratio, such as topk(0.05), and {self.compressor} "
                + ("is one already: use one of the two" if warmed_up else "has a count"),
                "warmup_steps",
            )

    @property
    def stages(self) -> tuple[int, ...]:
        return self._warmed_up().stages

    def at(self, step: int) -> "DGC":
        if len(self.stages) == 1:
            return self
        return replace(self, compressor=self._warmed_up().at(step), warmup_steps=0)

    def _warmed_up(self) -> Compressor:
        if not self.warmup_steps or getattr(self.compressor, "ratio", _START) >= _START:
            return self.compressor
        return Warmup(self.compressor, self.warmup_steps, _START)

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
