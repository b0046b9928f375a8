"""Mean: the average of compressed gradients, without a residual."""

from dataclasses import dataclass
from typing import ClassVar

from torchcomp.aggregators.one_way import OneWay
from torchcomp.bucket import Bucket
from torchcomp.compressors import Compressor, Identity
from torchcomp.exchange import Exchange
from torchcomp.keys import Key
from torchcomp.state import State

_DENSE = Identity()
_LARGE = 10**6


@dataclass(frozen=True)
class Mean(OneWay):
    """``mean`` is what DDP does; ``mean(C)`` averages C(gradient), and a bare ``C`` means the same.

    1. message = C(g)
    2. g <- mean of the decoded messages

    What C leaves out is lost, so a biased C (topk, randk) is better wrapped in ``ef``.

    Attributes:
        compressor: applied to each rank's gradient.
        exchange: "allreduce", "allgather", "sharded" or "auto" (see OneWay).
    """

    name: ClassVar[str] = "mean"

    compressor: Compressor = _DENSE

    @property
    def loses(self) -> bool:
        """Whether it leaves a large part of the gradient out, for good."""
        alpha = self.compressor.alpha(_LARGE)
        return self.compressor.omega(_LARGE) is None and (alpha is None or alpha < 0.5)

    @property
    def depends_on_grouping(self) -> bool:
        # Where elements are summed on the way, DDP's own buckets give DDP's order of additions.
        return not (self.compressor.elementwise and self.exchange in ("auto", "allreduce"))

    @property
    def transparent(self) -> bool:
        return isinstance(self.compressor, Identity)

    def aggregate(self, bucket: Bucket, exchange: Exchange, state: State, key: Key) -> None:
        route = self.route(bucket.shape, exchange, state, key)
        route.send(bucket.flat)
        route.mean(bucket.flat)
