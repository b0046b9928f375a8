"""Transfer: from every rank's message to the mean, by one of two collectives.

"sum" divides by the number of ranks first, as plain DDP does, and adds the messages on the way.
"gather" hands every rank all messages; each decodes them in rank order, because another order
rounds differently and the replicas would drift apart.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from torchcomp.codec import Codec, Message
from torchcomp.exchange import Exchange
from torchcomp.keys import Key


@dataclass
class Transfer:
    """One bucket's way through a collective.

    Attributes:
        codec: how the bucket is encoded.
        exchange: the collectives of the group.
        collective: "sum" or "gather".
        key: key of the encoding.
    """

    codec: Codec
    exchange: Exchange
    collective: str
    key: Key

    def encode(self, x: Tensor) -> Message:
        """This rank's message for `x` (1-D, of the codec's dtype); `x` may be overwritten.

        A vector with a NaN or an infinity is sent as NaN throughout, so that every rank learns of
        it, whichever entries were selected.
        """
        if self.collective == "sum":
            # As plain DDP does it: times the reciprocal, which rounds unlike a division.
            x = x.mul_(1.0 / self.exchange.world_size)
        message = self.codec.encode(x, self.key)
        if self.codec.compressor.elementwise:
            return message
        poison = nan_unless_finite(x)
        return [tuple(_spoil(part, poison) for part in parts) for parts in message]

    def subtract(self, message: Message, x: Tensor) -> None:
        """Take what `message` carries out of `x`, which it was made from."""
        scale = self.exchange.world_size if self.collective == "sum" else 1
        self.codec.accumulate(message, x, self.key, weight=-scale)

    def mean(self, message: Message, out: Tensor) -> None:
        """Exchange `message` and write the mean over the ranks to `out`."""
        if self.collective == "sum":
            self._mean_by_sum(message, out)
        else:
            self._mean_by_gather(message, out)

    def _mean_by_sum(self, message: Message, out: Tensor) -> None:
        values = [parts[0] for parts in message]
        total = values[0] if len(values) == 1 else torch.cat(values)
        self.exchange.sum(total)
        summed = torch.split(total, [value.numel() for value in values])
        self.codec.decode_into([(value,) for value in summed], out, self.key)

    def _mean_by_gather(self, message: Message, out: Tensor) -> None:
        received = self.exchange.gather(self.codec.pack(message))
        out.zero_()
        for raw in received:
            self.codec.accumulate(self.codec.unpack(raw), out, self.key)
        out.div_(self.exchange.world_size)


def nan_unless_finite(x: Tensor) -> Tensor:
    """A scalar tensor: 0 if every element of `x` is finite, else NaN. One pass, no host sync."""
    if not x.numel():
        return torch.zeros((), dtype=x.dtype, device=x.device)
    lowest, highest = torch.aminmax(x)
    return lowest * 0 + highest * 0


def _spoil(part: Tensor, poison: Tensor) -> Tensor:
    return part + poison if part.is_floating_point() else part
