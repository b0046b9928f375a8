"""AllGatherRoute: every rank receives and decodes all messages."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchcomp.codec import Codec, Message, add_messages
from torchcomp.exchange import Exchange
from torchcomp.kernels.select import Scratch
from torchcomp.keys import Key
from torchcomp.profiling import label
from torchcomp.wire import Frames


class AllGatherRoute:
    """All-gather of framed messages. See :class:`.base.Route`.

    Args:
        codec: how the bucket is encoded.
        frames: returns those of the codec on a device, the same in every step.
        exchange: the collectives of the group.
        key: key of the encoding.
        scratch: workspace of the encodings, one for each vector.
    """

    def __init__(
        self,
        codec: Codec,
        frames: Callable[[torch.device], Frames],
        exchange: Exchange,
        key: Key,
        scratch: Sequence[Scratch],
    ) -> None:
        self._codec, self._frames_on, self._exchange = codec, frames, exchange
        self._key, self._scratch = key, scratch

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
        received = exchange.all_gather_rows(self._frames.outgoing())
        exchange.check(self._frames, received, range(exchange.world_size))
        with label("decode"):
            messages = [(self._codec, parts) for parts in self._frames.unpack(received)]
            # In rank order on every rank: another order would round differently, and the replicas
            # would drift apart.
            add_messages(messages, out.zero_(), self._key)
        # Divide after the sum, as ShardedRoute does, so that both routes give the same bits.
        out.div_(exchange.world_size)

    def _pack(self, message: Message, device: torch.device) -> None:
        self._message, self._frames = message, self._frames_on(device)
        # Pack now: the message can be a view of `x`, which the caller changes next.
        self._frames.pack([encoded.parts for encoded in message])
