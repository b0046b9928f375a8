"""Aggregator: a bucket in, an estimate of its mean over the ranks out, in place."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from torchcomp.bucket import Bucket
from torchcomp.component import Component
from torchcomp.exchange import Exchange
from torchcomp.keys import Key
from torchcomp.state import State
from torchcomp.traffic import Load

Shape = tuple[tuple[str, ...], tuple[int, ...], torch.dtype]
"""Names, sizes and dtype of the parameters of one bucket."""


@dataclass(frozen=True)
class Aggregator(Component):
    """Turns every rank's bucket into an estimate of the mean bucket, equal on all ranks.

    Aggregators are stateless configuration; what has to survive a step lives in the
    :class:`State` that the caller hands in.

    Class attributes:
        remembers: whether it keeps an error memory.
        owes: whether the owners of shards keep one, too.
    """

    kind: ClassVar[str] = "aggregator"
    remembers: ClassVar[bool] = False
    owes: ClassVar[bool] = False

    @property
    def depends_on_grouping(self) -> bool:
        """Whether its result depends on which parameters share a bucket."""
        return True

    @property
    @abstractmethod
    def whole_model(self) -> bool:
        """Whether it works on all gradients of the model as one bucket."""

    @property
    def transparent(self) -> bool:
        """Whether it does what plain DDP does, NaN and infinities included."""
        return False

    def traces(self, dtype: torch.dtype) -> bool:
        """Whether a gradient's NaN and infinities, of a dtype, stay in the memory, and no others.

        Then the memory of a step that fails tells which parameters were at fault.
        """
        return False

    @abstractmethod
    def route(self, shape: Shape, world_size: int) -> str:
        """How messages travel: "sum", "gather" or "sharded" (see transfer.py)."""

    @abstractmethod
    def message_bytes(self, shape: Shape) -> int:
        """Bytes of what one rank has to say of its bucket, without frames."""

    @abstractmethod
    def load(self, shape: Shape, world_size: int, rank: int) -> Load:
        """What one bucket moves over a rank's link in a step.

        Exact, but for selections from a whole bucket that is sharded: how many entries fall into
        each shard is known then only in the mean.
        """

    @abstractmethod
    def memory_bytes(self, numel: int, dtype: torch.dtype, world_size: int) -> int:
        """Bytes of state that a rank keeps for `numel` elements."""

    @abstractmethod
    def aggregate(self, bucket: Bucket, exchange: Exchange, state: State, key: Key) -> None:
        """Replace ``bucket.flat`` by the estimate of its mean.

        Args:
            bucket: this rank's gradients; overwritten.
            exchange: the collectives of the group.
            state: opened for this bucket if the aggregator remembers; the caller commits it.
            key: seed, step and rank of this exchange.
        """
