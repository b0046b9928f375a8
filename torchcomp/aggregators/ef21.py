"""EF21: send the compressed difference between a gradient and its running estimate."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchcomp.aggregators.base import Law, check_contractive
from torchcomp.aggregators.one_way import OneWay
from torchcomp.engine.bucket import BucketShape
from torchcomp.engine.keys import Key
from torchcomp.engine.prepared import Prepared
from torchcomp.engine.state import Kind, Slot
from torchcomp.kernels.cast import narrow


@dataclass(frozen=True)
class EF21(OneWay):
    """``ef21(topk(0.05))``: changes of an estimate of the gradient.

    C is the compressor. Let s be the estimate of this rank's gradient g, and m the mean of all
    ranks' s. Both start at 0, so the steps are too short until s has grown to the size of g.

    1. message = C(g - s)
    2. s <- s + message
    3. m <- m + mean of all messages
    4. g <- m

    Invariant: m is the mean of all s, up to the rounding of float32 and of 16-bit all-reduces.
    Unlike ``ef``, the method does not conserve the sum of all gradients: a part that s never
    reached is not sent later.

    Reference: Richtárik, Sokolov, Fatkhullin, "EF21: A new, simpler, theoretically better, and
    practically faster error feedback", NeurIPS 2021.

    The other option is that of OneWay.

    Attributes:
        compressor: C, applied to what a rank sends; contractive, such as topk(0.05).
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
            Slot("mean_estimate", Kind.ESTIMATE, shape.names, shape.sizes, dtype, equal=True),
        )

    def law(self, shape: BucketShape) -> Law:
        # The mean grows by what the estimates of the ranks grow by, whatever the gradient is.
        error, smallest = self.sum_rounding(shape)
        return Law(
            gradient=0.0,
            before={"mean_estimate": -1.0, "estimate": 1.0},
            after={"estimate": -1.0},
            error=error,
            smallest=smallest,
        )

    def aggregate(self, g: Tensor, bucket: Prepared, key: Key) -> None:
        s, s_next = bucket.open("estimate")
        m, m_next = bucket.open("mean_estimate")
        route = bucket.route
        # Step 1. `s_next` and `m_next` are free until steps 2 and 3. Use them for -s and for what
        # is not sent of g - s, to save two temporary tensors.
        route.send_sum(g, torch.neg(s, out=s_next), m_next, key)
        s_next.copy_(s)
        route.sent(s_next)  # step 2
        route.mean(m_next)
        narrow(m_next.add_(m), g.dtype, g)  # steps 3 and 4
