"""AllReduceRoute: all-reduce messages that contain the same entries on all ranks."""

import torch
from torch import Tensor

from torchcomp.codec import Codec
from torchcomp.exchange import Exchange
from torchcomp.kernels.cast import narrow, saturate
from torchcomp.keys import Key
from torchcomp.profiling import label


class AllReduceRoute:
    """Divide by the number of ranks, as plain DDP does, then all-reduce. See :class:`.base.Route`.

    Args:
        codec: how the bucket is encoded. Each message has one floating-point field.
        exchange: the collectives of the group.
        key: key of the encoding.
    """

    def __init__(self, codec: Codec, exchange: Exchange, key: Key) -> None:
        self._codec, self._exchange, self._key = codec, exchange, key

    @label("encode")
    def send(self, x: Tensor) -> None:
        for vector in self._codec.vectors[:1]:
            # Saturate before the division, so that the sum over the ranks stays in range as well.
            dtype = vector.layout[0].dtype
            x = saturate(x, dtype, _share(dtype, self._exchange.world_size))
        # Plain DDP multiplies by the reciprocal. A division would round differently.
        self._message = self._codec.encode(x.mul_(1.0 / self._exchange.world_size), self._key)

    def send_sum(self, g: Tensor, e: Tensor, rest: Tensor) -> None:
        torch.add(g, e, out=rest)
        # Send `g`: `send` divides its argument in place, and `rest` must stay the undivided sum.
        self.send(narrow(rest, g.dtype, g, _share(g.dtype, self._exchange.world_size)))
        self.sent(rest, -1.0)

    def sent(self, out: Tensor, weight: float = 1.0) -> None:
        weight *= self._exchange.world_size  # undoes the division in `send`
        self._codec.subtract(self._message, out, self._key, -weight)

    def mean(self, out: Tensor) -> None:
        values = [own for (own,) in self._message.parts]
        # One collective for the whole bucket, even if it is encoded parameter by parameter.
        total = values[0] if len(values) == 1 else torch.cat(values)
        self._exchange.all_reduce(total)
        summed = torch.split(total, [value.numel() for value in values])
        with label("decode"):
            self._codec.mean([[(value,) for value in summed]], out, self._key, 1)


def _share(dtype: torch.dtype, world_size: int) -> float:
    """Return the fraction of a dtype's range that values can use without an overflow of the sum."""
    # Division by a power of two is exact.
    if world_size & (world_size - 1) == 0:
        return 1.0
    # Otherwise each rank's part is rounded, and so is the sum at every hop. Three times a third of
    # the largest number can then be infinite.
    return max(0.5, 1.0 - world_size * torch.finfo(dtype).eps / 2)
