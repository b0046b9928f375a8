"""Mean: the average of compressed gradients, without a residual."""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from torchcomp.aggregators.base import Law
from torchcomp.aggregators.one_way import OneWay
from torchcomp.compressors import Compressor, Identity
from torchcomp.engine.bucket import BucketShape
from torchcomp.engine.keys import Key
from torchcomp.engine.prepared import Prepared

_DENSE = Identity()
# The constants alpha and omega depend on the vector's length. Judge them for a realistic bucket.
_LARGE = 10**6


@dataclass(frozen=True)
class Mean(OneWay):
    """``mean``: do what plain DDP does.

    ``mean(C)``, or ``C`` for short, averages C(gradient).

    1. message = C(g)
    2. g <- mean of the decoded messages

    What C does not send is lost. Wrap a biased C (topk, randk) in ``ef`` instead.

    The options are those of OneWay.
    """

    name: ClassVar[str] = "mean"

    compressor: Compressor = _DENSE

    @property
    def loses(self) -> bool:
        """Whether the method permanently drops a large part of the gradient."""
        alpha = self.compressor.alpha(_LARGE)
        return self.compressor.omega(_LARGE) is None and (alpha is None or alpha < 0.5)

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
