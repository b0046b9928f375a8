"""AllReduceRoute: all-reduce messages that contain the same entries on all ranks."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from torchcomp.compressors.base import Encoded
from torchcomp.compressors.dense import Dense
from torchcomp.engine.keys import Key
from torchcomp.engine.profiling import OFF, span
from torchcomp.exchange import Exchange
from torchcomp.kernels import backend
from torchcomp.kernels.cast import narrow, saturate
from torchcomp.routes.codec import Codec


class AllReduceRoute:
    """Divide by the number of ranks, as plain DDP does, then all-reduce. As AllGatherRoute."""

    def __init__(self, codec: Codec, exchange: Exchange) -> None:
        self._codec, self._exchange, self._ranks = codec, exchange, exchange.world_size
        vectors = codec.vectors
        fields = [vector.layout[0] for vector in vectors]
        self._counts = [field.count for field in fields]
        # Of the message. A bucket without parameters has none.
        self._dtype = fields[0].dtype if fields else vectors.dtype
        self._shares = tuple(_share(dtype, self._ranks) for dtype in (vectors.dtype, self._dtype))
        sends_all = len(vectors) == 1 and isinstance(vectors.compressor, Dense)
        # What is sent as it is can be divided in the same launch as it is summed.
        self._dense = sends_all and vectors.compressor.alpha(1) == 1.0
        self._sent = 1.0 / self._ranks  # of what was encoded, the share that is in the message
        self._casts: Any = None
        self._memory = torch.empty(0)  # of a cast's message
        if sends_all and not self._dense:
            form = backend.device_form("elementwise", torch.empty(0, device=vectors.device))
            if form is not None and vectors.dtype in form.DTYPES:
                self._casts = form.CastSum(vectors.dtype, self._dtype, self._ranks, self._shares)
                self._dtypes = form.DTYPES
                count = self._counts[0]
                self._memory = torch.empty(count, dtype=self._dtype, device=vectors.device)

    def send(self, x: Tensor, key: Key) -> None:
        with span("encode") if profiler._is_profiler_enabled else OFF:
            self._key, self._sent = key, 1.0
            if not self._dense:
                self._encode(x, key)
            else:
                self._message = self._codec.fields(x, key)

    def _encode(self, x: Tensor, key: Key) -> None:
        self._key, self._sent = key, 1.0 / self._ranks
        # Saturate before the division, so that the sum over the ranks stays in range as well.
        x = saturate(x, self._dtype, self._shares[1])
        # Plain DDP multiplies by the reciprocal. A division would round differently.
        self._message = self._codec.fields(x.mul_(1.0 / self._ranks), key)

    def send_sum(self, g: Tensor, e: Tensor, rest: Tensor, key: Key) -> None:
        with span("encode") if profiler._is_profiler_enabled else OFF:
            if self._casts is not None and rest.dtype in self._dtypes:
                self._key, self._sent = key, 1.0 / self._ranks
                self._casts.add(g, e, rest, self._memory)
                self._message = Encoded([(self._memory,)])
                return
            torch.add(g, e, out=rest)
            # Encode `g`: it is divided in place, and `rest` must stay the undivided sum.
            self._encode(narrow(rest, g.dtype, g, self._shares[0]), key)
            # The factor undoes the division.
            self._codec.subtract(self._message, rest, key, self._ranks)

    def sent(self, out: Tensor) -> None:
        self._codec.subtract(self._message, out, self._key, -1.0 / self._sent)

    def mean(self, out: Tensor) -> None:
        values = [fields[0] for fields in self._message.parts]
        # One collective for the whole bucket, even if it is encoded parameter by parameter.
        total = values[0] if len(values) == 1 else torch.cat(values)
        self._exchange.all_reduce(total, divide=self._sent == 1.0)
        with span("decode") if profiler._is_profiler_enabled else OFF:
            if total is self._memory:
                out.copy_(total)
                return
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
