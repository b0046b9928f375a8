"""AllGatherRoute: every rank receives and decodes all messages."""

import torch
from torch import Tensor

from torchcomp.codec import Codec
from torchcomp.compressors.base import Encoded
from torchcomp.exchange import Exchange
from torchcomp.keys import Key
from torchcomp.profiling import label
from torchcomp.routes.base import received


class AllGatherRoute:
    """All-gather of framed messages. See :class:`.base.Route`.

    Args:
        codec: how the bucket is encoded.
        exchange: the collectives of the group.
        key: key of the encoding.
    """

    def __init__(self, codec: Codec, exchange: Exchange, key: Key) -> None:
        self._codec, self._exchange, self._key = codec, exchange, key

    @label("encode")
    def send(self, x: Tensor) -> None:
        self._pack(self._codec.encode(x, self._key), x.device)

    @label("encode")
    def send_sum(self, g: Tensor, e: Tensor, rest: Tensor) -> None:
        self._pack(self._codec.encode_sum(g, e, rest, self._key), g.device)

    def sent(self, out: Tensor, weight: float = 1.0) -> None:
        self._codec.subtract(self._message, out, self._key, -weight)

    def mean(self, out: Tensor) -> None:
        exchange = self._exchange
        frames, ranks = exchange.all_gather(self._frame), range(exchange.world_size)
        with label("decode"):
            messages = received(self._codec, exchange, ranks, frames)
            self._codec.mean(messages, out, self._key, len(ranks))

    def _pack(self, message: Encoded, device: torch.device) -> None:
        self._message = message
        # Pack now: the message can be a view of `x`, which the caller changes next.
        self._frame = torch.empty(self._codec.framed, dtype=torch.uint8, device=device)
        self._codec.pack(message, self._frame)
