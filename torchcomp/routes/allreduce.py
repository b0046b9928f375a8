"""AllReduceRoute: all-reduce messages that contain the same entries on all ranks."""

import torch
from torch import Tensor
from torch.autograd import profiler

from torchcomp.codec import Codec
from torchcomp.exchange import Exchange
from torchcomp.kernels.cast import narrow, saturate
from torchcomp.keys import Key
from torchcomp.profiling import OFF, span


class AllReduceRoute:
    """Divide by the number of ranks, as plain DDP does, then all-reduce. See :class:`.base.Route`.

    Args:
        codec: encodes the bucket. Each message has one floating-point field.
        exchange: the collectives of the group.
    """

    def __init__(self, codec: Codec, exchange: Exchange) -> None:
        self._codec, self._exchange, self._ranks = codec, exchange, exchange.world_size
        fields = [vector.layout[0] for vector in codec.vectors]
        self._counts = [field.count for field in fields]
        # Of the message. A bucket without parameters has none.
        self._dtype = fields[0].dtype if fields else torch.float32
        self._share = _share(self._dtype, self._ranks)

    def send(self, x: Tensor, key: Key) -> None:
        with span("encode") if profiler._is_profiler_enabled else OFF:
            self._key = key
            # Saturate before the division, so that the sum over the ranks stays in range as well.
            x = saturate(x, self._dtype, self._share)
            # Plain DDP multiplies by the reciprocal. A division would round differently.
            self._message = self._codec.fields(x.mul_(1.0 / self._ranks), key)

    def send_sum(self, g: Tensor, e: Tensor, rest: Tensor, key: Key) -> None:
        torch.add(g, e, out=rest)
        # Send `g`: `send` divides its argument in place, and `rest` must stay the undivided sum.
        self.send(narrow(rest, g.dtype, g, _share(g.dtype, self._ranks)), key)
        # The factor undoes the division in `send`.
        self._codec.subtract(self._message, rest, key, self._ranks)

    def sent(self, out: Tensor) -> None:
        self._codec.subtract(self._message, out, self._key, -self._ranks)

    def mean(self, out: Tensor) -> None:
        values = [fields[0] for fields in self._message.parts]
        # One collective for the whole bucket, even if it is encoded parameter by parameter.
        total = values[0] if len(values) == 1 else torch.cat(values)
        self._exchange.all_reduce(total)
        with span("decode") if profiler._is_profiler_enabled else OFF:
            summed = [total] if len(values) == 1 else torch.split(total, self._counts)
            self._codec.mean([[(value,) for value in summed]], out, self._key, 1)


def _share(dtype: torch.dtype, world_size: int) -> float:
    """Return the fraction of a dtype's range that values can use without an overflow of the sum."""
    # Division by a power of two is exact.
    if world_size & (world_size - 1) == 0:
        return 1.0
    # Otherwise each rank's part is rounded, and so is the sum at every hop. Three times a third of
    # the largest number can then be infinite.
    return max(0.5, 1.0 - world_size * torch.finfo(dtype).eps / 2)
