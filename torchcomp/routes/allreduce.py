"""AllReduceRoute: messages with the same support on all ranks are added on the way."""

import torch
from torch import Tensor

from torchcomp.codec import Codec
from torchcomp.exchange import Exchange
from torchcomp.kernels.cast import narrow, saturate
from torchcomp.keys import Key


class AllReduceRoute:
    """Divide by the number of ranks, as plain DDP does, then all-reduce. See :class:`.base.Route`.

    Args:
        codec: how the bucket is encoded; each message has one floating-point field.
        exchange: the collectives of the group.
        key: key of the encoding.
    """

    def __init__(self, codec: Codec, exchange: Exchange, key: Key) -> None:
        self._codec, self._exchange, self._key = codec, exchange, key

    def send(self, x: Tensor) -> None:
        for vector in self._codec.vectors[:1]:
            # Before the division: so the sum over the ranks stays within the range, too.
            dtype = vector.layout[0].dtype
            x = saturate(x, dtype, _share(dtype, self._exchange.world_size))
        # Times the reciprocal, as plain DDP does it, which rounds unlike a division.
        self._message = self._codec.encode(x.mul_(1.0 / self._exchange.world_size), self._key)

    def send_sum(self, g: Tensor, e: Tensor, x: Tensor) -> None:
        torch.add(g, e, out=x)
        # Sending scales what it is given, and `x` is the residual to be.
        self.send(narrow(x, g.dtype, g, _share(g.dtype, self._exchange.world_size)))

    def sent(self, out: Tensor, weight: float = 1.0) -> None:
        weight *= self._exchange.world_size
        self._codec.subtract(self._message, out, self._key, -weight)

    def mean(self, out: Tensor) -> None:
        values = [encoded.parts[0] for encoded in self._message]
        total = values[0] if len(values) == 1 else torch.cat(values)
        self._exchange.all_reduce(total)
        summed = torch.split(total, [value.numel() for value in values])
        self._codec.decode([(value,) for value in summed], out, self._key)


def _share(dtype: torch.dtype, world_size: int) -> float:
    """The share of a dtype's range that a mean may fill, so that no sum of its parts overflows.

    A part of 1 / 3 is rounded, and so is the sum at every hop: three thirds of the largest number
    can be infinite.
    """
    if world_size & (world_size - 1) == 0:
        return 1.0
    return max(0.5, 1.0 - world_size * torch.finfo(dtype).eps / 2)
