"""Route: send a bucket's messages and compute their mean over the ranks."""

from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from torch import Tensor

from torchcomp.codec import Codec, add_messages
from torchcomp.exchange import Exchange
from torchcomp.keys import Key
from torchcomp.profiling import label


class Route(Protocol):
    """The exchange of one bucket in one step.

    Call :meth:`send` or :meth:`send_sum` first, then :meth:`sent` if needed, and :meth:`mean` last.
    """

    def send(self, x: Tensor) -> None:
        """Encode `x` (1-D, of the bucket's dtype) as this rank's message; can overwrite `x`.

        A selection from a whole bucket also exchanges how many entries there are in each shard.
        """

    def send_sum(self, g: Tensor, e: Tensor, x: Tensor) -> None:
        """Write ``g + e`` to `x` and encode it as this rank's message; can overwrite `g`."""

    def sent(self, out: Tensor, weight: float = 1.0) -> None:
        """Add `weight` times the decoded message of this rank to `out`, in place.

        With weight -1 and the encoded `x` as `out`, `out` becomes the residual. NaN and infinities
        of `x` stay in the residual.
        """

    def mean(self, out: Tensor) -> None:
        """Exchange the messages and write their mean over the ranks to `out`."""


@label("decode")
def add_frames(
    codecs: Sequence[Codec],
    exchange: Exchange,
    senders: Sequence[int],
    frames: Sequence[Tensor],
    out: Tensor,
    key: Key,
) -> None:
    """Check and decode frames, and add them to `out`.

    Args:
        codecs: the codec of each message, in rank order. A message can have several frames.
        exchange: records damaged frames.
        senders: rank that sent each frame.
        frames: the frames of all messages, 1-D uint8.
        out: 1-D, with the elements of the bucket or shard.
        key: key of the encodings.
    """
    lengths = [length for codec in codecs for length in codec.lengths]
    payloads = iter(exchange.receive(senders, frames, lengths))
    # Rank order on every rank: another order would round differently, and the replicas would
    # drift apart.
    messages = [(codec, codec.unpack(*islice(payloads, len(codec.lengths)))) for codec in codecs]
    add_messages(messages, out, key)
