"""Aggregator: a bucket in, an estimate of its mean over the ranks out, in place."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from torchcomp.aggregators.transfer import Transfer
from torchcomp.bucket import Bucket
from torchcomp.codec import Codec
from torchcomp.component import Component, check_choice, check_kind
from torchcomp.compressors import Compressor
from torchcomp.errors import SpecError
from torchcomp.exchange import Exchange
from torchcomp.keys import Key
from torchcomp.memory import ErrorMemory

EXCHANGES = ("auto", "gather", "sum")


@dataclass(frozen=True)
class Aggregator(Component):
    """Turns every rank's bucket into an estimate of the mean bucket, equal on all ranks.

    Aggregators are stateless configuration; what has to survive a step lives in the
    :class:`ErrorMemory` that the caller hands in.

    Class attributes:
        remembers: whether it keeps an error memory.
    """

    kind: ClassVar[str] = "aggregator"
    remembers: ClassVar[bool] = False

    compressor: Compressor
    exchange: str = "auto"

    def __post_init__(self) -> None:
        check_kind(self, "compressor", Compressor)
        check_choice(self, "exchange", EXCHANGES)
        if self.exchange == "sum" and not self.compressor.summable:
            raise SpecError(
                f"sum needs one support on all ranks; {self.compressor.name} selects per rank: "
                'use exchange="gather"',
                "exchange",
            )

    @property
    def collective(self) -> str:
        """How messages travel, with "auto" resolved: "sum" where they can be added, or "gather"."""
        if self.exchange != "auto":
            return self.exchange
        return "sum" if self.compressor.summable else "gather"

    @property
    def loses(self) -> bool:
        """Whether it leaves a large part of the gradient out, for good."""
        return False

    @property
    def depends_on_grouping(self) -> bool:
        """Whether its result depends on which parameters share a bucket."""
        return True

    @property
    def transparent(self) -> bool:
        """Whether it does what plain DDP does, NaN and infinities included."""
        return False

    def message_bytes(
        self, names: tuple[str, ...], sizes: tuple[int, ...], dtype: torch.dtype
    ) -> int:
        """Bytes of one rank's message for a bucket."""
        return Codec(self.compressor, names, sizes, dtype).nbytes

    def memory_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes of state that a rank keeps for `numel` elements."""
        return 0

    def transfer(self, bucket: Bucket, exchange: Exchange, key: Key) -> Transfer:
        """The bucket's way through this aggregator's compressor and collective."""
        codec = Codec(self.compressor, bucket.names, bucket.sizes, bucket.flat.dtype)
        return Transfer(codec, exchange, self.collective, key)

    @abstractmethod
    def aggregate(self, bucket: Bucket, exchange: Exchange, memory: ErrorMemory, key: Key) -> None:
        """Replace ``bucket.flat`` by the estimate of its mean.

        Args:
            bucket: this rank's gradients; overwritten.
            exchange: the collectives of the group.
            memory: opened for this bucket if the aggregator remembers; the caller commits it.
            key: seed, step and rank of this exchange.
        """
