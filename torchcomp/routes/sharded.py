"""ShardedRoute: send entries to the rank that owns their shard of a bucket, and send back the mean.

1. up:   all-to-all; every rank sends each owner the entries in that owner's shard
2. own:  the owner averages them in rank order and adds its server residual, if there is one
3. down: all-gather; the owners send their downlink messages to all ranks

The traffic of a rank does not grow with the number of ranks.
"""

import torch
from torch import Tensor
from torch.autograd import profiler

from torchcomp.compressors.base import Encoded
from torchcomp.engine.keys import Key
from torchcomp.engine.prepared import Prepared
from torchcomp.engine.profiling import OFF, span
from torchcomp.kernels.cast import narrow
from torchcomp.routes.codec import Codec
from torchcomp.routes.exact import ExactDownlink, ExactUplink
from torchcomp.routes.shards import Direction


class ShardedRoute:
    """Exchange of one bucket through the owners of its shards. See :class:`.AllGatherRoute`."""

    def __init__(
        self, bucket: Prepared, up: Direction, down: Direction, dtype: torch.dtype
    ) -> None:
        rank = bucket.exchange.rank
        own = up.shards[rank]
        self._total = torch.empty(own.stop - own.start, dtype=dtype, device=bucket.device)
        self._up = (ExactUplink if up.exact else _Uplink)(bucket, up)
        exact = down.exact and "server_error" in bucket.slots
        self._down = (ExactDownlink if exact else _Downlink)(bucket, down)

    def send(self, x: Tensor, key: Key) -> None:
        with span("encode") if profiler._is_profiler_enabled else OFF:
            self._key = key
            self._up.encode(x, key)

    def send_sum(self, g: Tensor, e: Tensor, rest: Tensor, key: Key) -> None:
        with span("encode") if profiler._is_profiler_enabled else OFF:
            self._key = key
            self._up.encode_sum(g, e, rest, key)

    def sent(self, out: Tensor) -> None:
        self._up.subtract(out, self._key, -1.0)

    def mean(self, out: Tensor) -> None:
        self._up.mean(self._total, self._key)
        with span("encode downlink") if profiler._is_profiler_enabled else OFF:
            self._down.encode(self._total, self._key)
        self._down.mean(out, self._key)


class _Uplink:
    """Messages of fixed sizes to all owners."""

    def __init__(self, bucket: Prepared, up: Direction) -> None:
        self._exchange = exchange = bucket.exchange
        self._outgoing = up.codec(bucket.device, exchange.checksum)
        fixed, dtype = up.fixed[exchange.rank], up.shape.dtype
        self._arriving = Codec(fixed, bucket.device, dtype, None, exchange.checksum)
        self._sizes = self._arriving.frames.sizes * exchange.world_size
        self._message = Encoded(())

    def encode(self, x: Tensor, key: Key) -> None:
        self._message = self._outgoing.encode(x, key)

    def encode_sum(self, g: Tensor, e: Tensor, rest: Tensor, key: Key) -> None:
        self._message = self._outgoing.encode_sum(g, e, rest, key)

    def subtract(self, x: Tensor, key: Key, weight: float) -> None:
        self._outgoing.subtract(self._message, x, key, weight)

    def mean(self, out: Tensor, key: Key) -> None:
        exchange, arriving, frames = self._exchange, self._arriving, self._outgoing.frames
        received = exchange.all_to_all(frames.outgoing(), frames.sizes, self._sizes)
        received = received.view(exchange.world_size, arriving.frames.nbytes)
        exchange.check(arriving.frames, received, range(exchange.world_size))
        with span("decode") if profiler._is_profiler_enabled else OFF:
            # In rank order on every rank, as in AllGatherRoute.
            arriving.mean_of(received, out, key, exchange.world_size)


class _Downlink:
    """Messages of fixed sizes from all owners."""

    def __init__(self, bucket: Prepared, down: Direction) -> None:
        self._bucket, self._exchange = bucket, bucket.exchange
        self._feedback = "server_error" in bucket.slots
        self._dtype = down.shape.dtype
        checksum, fixed = self._exchange.checksum, down.fixed[self._exchange.rank]
        self._own = Codec(fixed, bucket.device, self._dtype, None, checksum)
        self._everyone = down.codec(bucket.device, checksum)
        self._even = len(set(self._everyone.frames.sizes)) == 1

    def encode(self, mean: Tensor, key: Key) -> None:
        if self._feedback:
            e, rest = self._bucket.open("server_error")
            self._own.encode_sum(mean, e, rest, key)
        else:
            self._own.encode(narrow(mean, self._dtype), key)

    def mean(self, out: Tensor, key: Key) -> None:
        exchange, everyone, memory = self._exchange, self._everyone, self._own.frames.outgoing()
        # Messages of different lengths need `all_gather_v`, which copies the frame for each rank.
        if self._even:
            received = exchange.all_gather_rows(memory)
        else:
            received = exchange.all_gather_v(memory, everyone.frames.sizes)
        received = received.view(1, -1)
        exchange.check(everyone.frames, received, range(exchange.world_size))
        with span("decode") if profiler._is_profiler_enabled else OFF:
            everyone.mean_of(received, out, key, 1)
