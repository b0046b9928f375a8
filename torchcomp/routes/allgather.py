"""AllGatherRoute: every rank receives and decodes all messages."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchcomp.codec import Codec, Message
from torchcomp.exchange import Exchange
from torchcomp.kernels.select import Scratch
from torchcomp.keys import Key
from torchcomp.profiling import label
from torchcomp.routes.base import add_frames


class AllGatherRoute:
    """All-gather of framed messages. See :class:`.base.Route`.

    Args:
        codec: how the bucket is encoded.
        exchange: the collectives of the group.
        key: key of the encoding.
        scratch: workspace of the encodings, one for each vector.
    """

    def __init__(
        self, codec: Codec, exchange: Exchange, key: Key, scratch: Sequence[Scratch]
    ) -> None:
        self._codec, self._exchange, self._key, self._scratch = codec, exchange, key, scratch

    @label("encode")
    def send(self, x: Tensor) -> None:
        self._pack(self._codec.encode(x, self._key), x.device)

    @label("encode")
    def send_sum(self, g: Tensor, e: Tensor, x: Tensor) -> None:
        message = self._codec.encode_sum(g, e, x, self._key, self._scratch, g.dtype)
        self._pack(message, x.device)

    def sent(self, out: Tensor, weight: float = 1.0) -> None:
        self._codec.subtract(self._message, out, self._key, -weight)

    def mean(self, out: Tensor) -> None:
        exchange = self._exchange
        frames, ranks = exchange.all_gather(self._frame), range(exchange.world_size)
        add_frames([self._codec] * len(ranks), exchange, ranks, frames, out.zero_(), self._key)
        # Divide after the sum, as ShardedRoute does, so that both routes give the same bits.
        out.div_(exchange.world_size)

    def _pack(self, message: Message, device: torch.device) -> None:
        self._message = message
        # Pack now: the message can be a view of `x`, which the caller changes next.
        self._frame = torch.empty(self._codec.framed, dtype=torch.uint8, device=device)
        self._codec.pack(message, self._frame)
