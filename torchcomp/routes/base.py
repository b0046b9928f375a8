"""Route: send a bucket's messages and compute their mean over the ranks."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from torchcomp.codec import Codec
from torchcomp.compressors.base import Message
from torchcomp.exchange import Exchange


class Route(Protocol):
    """The exchange of one bucket in one step.

    Call :meth:`send` or :meth:`send_sum` first, then :meth:`sent` if needed, and :meth:`mean` last.
    """

    def send(self, x: Tensor) -> None:
        """Encode `x` (1-D, of the bucket's dtype) as this rank's message; can overwrite `x`.

        A selection from a whole bucket also exchanges how many entries there are in each shard.
        """

    def send_sum(self, g: Tensor, e: Tensor, rest: Tensor) -> None:
        """Encode ``g + e`` as this rank's message, and write what it does not contain to `rest`.

        NaN and infinities of a selecting compressor stay in `rest`. Can overwrite `g`.
        """

    def sent(self, out: Tensor, weight: float = 1.0) -> None:
        """Add `weight` times the decoded message of this rank to `out`, in place.

        NaN and infinities are not added, if the compressor selects.
        """

    def mean(self, out: Tensor) -> None:
        """Exchange the messages and write their mean over the ranks to `out`."""


def received(
    codec: Codec, exchange: Exchange, senders: Sequence[int], frames: Sequence[Tensor]
) -> list[Message]:
    """Check frames, and return their messages.

    Args:
        codec: the codec of all messages. A message can have several frames.
        exchange: records damaged frames.
        senders: rank that sent each frame.
        frames: the frames of all messages, 1-D uint8, in rank order.
    """
    size = len(codec.lengths)
    payloads = exchange.receive(senders, frames, codec.lengths * (len(frames) // size))
    return [codec.unpack(*payloads[i : i + size]) for i in range(0, len(payloads), size)]
