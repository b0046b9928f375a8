"""EF: error feedback. Add what was not sent to the next gradient."""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from torchcomp.aggregators.base import Law, Residual, ResidualDtype
from torchcomp.aggregators.one_way import OneWay
from torchcomp.engine.bucket import BucketShape
from torchcomp.engine.keys import Key
from torchcomp.engine.prepared import Prepared


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
