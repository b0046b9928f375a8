"""Aggregator: a bucket in, an estimate of its mean over the ranks out, in place."""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from torchcomp.bucket import Bucket, BucketShape
from torchcomp.component import Component
from torchcomp.exchange import Exchange
from torchcomp.keys import Key
from torchcomp.state import Slot, State
from torchcomp.traffic import Load


@dataclass(frozen=True)
class Cost:
    """What one bucket costs a rank in a step."""

    collective: str  # how messages travel: "allreduce", "allgather" or "sharded"
    message_bytes: int  # bytes of what one rank has to say of its bucket, without frames
    load: Load = field(default_factory=Load)  # what the step moves over the rank's link


@dataclass(frozen=True)
class Aggregator(Component):
    """Turns every rank's bucket into an estimate of the mean bucket, equal on all ranks.

    Aggregators are stateless configuration. What has to survive a step lives in the slots that
    :meth:`slots` declares, in the :class:`State` that the caller hands in.
    """

    kind: ClassVar[str] = "aggregator"

    @property
    def depends_on_grouping(self) -> bool:
        """Whether its result depends on which parameters share a bucket."""
        return True

    @property
    def whole_model(self) -> bool:
        """Whether it works on all gradients of the model as one bucket."""
        return False

    @property
    def transparent(self) -> bool:
        """Whether it does what plain DDP does, NaN and infinities included."""
        return False

    def traces(self, dtype: torch.dtype) -> bool:
        """Whether a gradient's NaN and infinities, and no others, show in the slot "error".

        Then the residual of a step that fails tells which parameters were at fault, and the
        gradients need not be looked at before.
        """
        return False

    def slots(self, shape: BucketShape, world_size: int, rank: int) -> tuple[Slot, ...]:
        """What is kept for a bucket on one rank. The gradient that was not sent is "error"."""
        return ()

    @abstractmethod
    def cost(self, shape: BucketShape, world_size: int, rank: int = 0) -> Cost:
        """What one bucket costs a rank in a step.

        Exact, but for selections from a whole bucket that is sharded: how many entries fall into
        each shard is known then only in the mean.
        """

    @abstractmethod
    def aggregate(self, bucket: Bucket, exchange: Exchange, state: State, key: Key) -> None:
        """Replace ``bucket.flat`` by the estimate of its mean.

        Args:
            bucket: this rank's gradients; overwritten.
            exchange: the collectives of the group.
            state: where the slots are; the caller commits it.
            key: seed, step and rank of this exchange.
        """
