"""Mean: the average of compressed gradients, without memory."""

from dataclasses import dataclass
from typing import ClassVar

from torchcomp.aggregators.base import Aggregator
from torchcomp.bucket import Bucket
from torchcomp.compressors import Compressor, Identity
from torchcomp.exchange import Exchange
from torchcomp.keys import Key
from torchcomp.memory import ErrorMemory

_DENSE = Identity()
_LARGE = 10**6


@dataclass(frozen=True)
class Mean(Aggregator):
    """``mean`` is what DDP does; ``mean(C)`` averages C(gradient), and a bare ``C`` means the same.

    1. message = C(g)
    2. g <- mean of the decoded messages

    What C leaves out is lost, so a biased C (topk, randk) is better wrapped in ``ef``.

    Attributes:
        compressor: applied to each rank's gradient.
        exchange: "sum", "gather", or "auto" (sum where messages can be added).
    """

    name: ClassVar[str] = "mean"

    compressor: Compressor = _DENSE

    @property
    def loses(self) -> bool:
        alpha = self.compressor.alpha(_LARGE)
        return self.compressor.omega(_LARGE) is None and (alpha is None or alpha < 0.5)

    @property
    def depends_on_grouping(self) -> bool:
        # Also where each element is summed in DDP's order, so that plain DDP is matched exactly.
        return not self.compressor.elementwise

    @property
    def transparent(self) -> bool:
        return isinstance(self.compressor, Identity)

    def aggregate(self, bucket: Bucket, exchange: Exchange, memory: ErrorMemory, key: Key) -> None:
        transfer = self.transfer(bucket, exchange, key)
        message = transfer.encode(bucket.flat)
        transfer.mean(message, out=bucket.flat)
