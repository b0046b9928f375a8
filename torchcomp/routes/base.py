"""Route: one bucket's way from every rank's message to the mean.

All routes decode in rank order, because another order rounds differently and the replicas would
drift apart.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from torchcomp.codec import Codec
from torchcomp.exchange import Exchange
from torchcomp.keys import Key


class Route(Protocol):
    """One bucket in one step: first a message is made, then it is exchanged."""

    def send(self, x: Tensor) -> None:
        """Make this rank's message for `x` (1-D, of the bucket's dtype); may overwrite `x`."""

    def send_sum(self, g: Tensor, e: Tensor, x: Tensor) -> None:
        """Make this rank's message for ``x = g + e``; writes `x`, may overwrite `g`."""

    def sent(self, out: Tensor, weight: float = 1.0) -> None:
        """Add `weight` times what the message carries to `out`, in place.

        With weight -1 and the `x` that it was made from, `out` becomes what was not sent. A value
        that is not finite adds nothing to that.
        """

    def mean(self, out: Tensor) -> None:
        """Exchange messages, and write the mean over the ranks to `out`."""


def add_frames(
    codec: Codec, exchange: Exchange, frames: Sequence[tuple[int, Tensor]], out: Tensor, key: Key
) -> None:
    """Check and decode frames of one codec, and add them to `out` in their order.

    Args:
        codec: of all of them.
        exchange: notes what is wrong with them.
        frames: with the rank that each came from.
        out: 1-D, of the bucket's or shard's elements.
        key: of the encodings.
    """
    if codec.nbytes:
        received = [exchange.receive(sender, frame, codec.nbytes) for sender, frame in frames]
        codec.accumulate([codec.unpack(payload) for payload in received], out, key)
