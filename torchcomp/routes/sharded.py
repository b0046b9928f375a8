"""ShardedRoute: send entries to the rank that owns their shard of a bucket, and send back the mean.

1. up:   all-to-all; every rank sends each owner the entries in that owner's shard
2. own:  the owner averages them in rank order and adds its server residual, if there is one
3. down: all-gather; the owners send their downlink messages to all ranks

The traffic of a rank does not grow with the number of ranks. With an exact selection, entries are
those of the whole bucket, with any number of them in a shard. A collective needs the lengths of
messages, so the host then waits for the counts of entries, in both directions.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from torchcomp.compressors.base import Encoded, Vector, Vectors
from torchcomp.engine import host
from torchcomp.engine.keys import Key
from torchcomp.engine.prepared import Prepared
from torchcomp.engine.profiling import OFF, span
from torchcomp.engine.state import Kind
from torchcomp.kernels.cast import narrow
from torchcomp.routes.codec import Codec
from torchcomp.routes.searches import HostSearch
from torchcomp.routes.shards import Direction
from torchcomp.routes.wire import counted_signature


class ShardedRoute:
    """Exchange of one bucket through the owners of its shards. See :class:`.AllGatherRoute`."""

    def __init__(
        self, bucket: Prepared, up: Direction, down: Direction, dtype: torch.dtype
    ) -> None:
        rank = bucket.exchange.rank
        own = up.shards[rank]
        self._total = torch.empty(own.stop - own.start, dtype=dtype, device=bucket.device)
        self._up = (_ExactUplink if up.exact else _Uplink)(bucket, up)
        exact = down.exact and "server_error" in bucket.slots
        self._down = (_ExactDownlink if exact else _Downlink)(bucket, down)

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
        received = exchange.all_to_all(frames.outgoing, frames.sizes, self._sizes)
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
        exchange, everyone, memory = self._exchange, self._everyone, self._own.frames.outgoing
        # Messages of different lengths need `all_gather_v`, which copies the frame for each rank.
        if self._even:
            received = exchange.all_gather_rows(memory)
        else:
            received = exchange.all_gather_v(memory, everyone.frames.sizes)
        received = received.view(1, -1)
        exchange.check(everyone.frames, received, range(exchange.world_size))
        with span("decode") if profiler._is_profiler_enabled else OFF:
            everyone.mean_of(received, out, key, 1)


class _ExactUplink:
    """Entries that are selected from the whole bucket, for the owners of their shards."""

    def __init__(self, bucket: Prepared, up: Direction) -> None:
        exchange, device = bucket.exchange, bucket.device
        self._exchange, self._selector = exchange, up.compressor
        self._selects = Vectors(up.whole, device, up.shape.dtype)
        everyone = range(exchange.world_size)
        self._messages = _messages(bucket, up, everyone, [exchange.rank] * exchange.world_size)
        starts = [place.start for owner in everyone for place in up.places(owner, True)]
        # The last one is above every index.
        self._starts = host.copy_to(torch.tensor([*starts, 2**63 - 1]), device)
        self._pieces = [len(pieces) for pieces in up.pieces]
        self._arriving = [self._pieces[exchange.rank]] * exchange.world_size
        self._none = torch.empty(0, dtype=torch.int64, device=device)

    def encode(self, x: Tensor, key: Key) -> None:
        index = self._selector.select(x, self._selects) if self._selects else self._none
        self._write(x, index, key, False)

    def encode_sum(self, g: Tensor, e: Tensor, rest: Tensor, key: Key) -> None:
        selects = self._selects
        index = self._selector.select_sum(g, e, rest, selects) if selects else self._none
        self._write(rest, index, key, True)

    def subtract(self, x: Tensor, key: Key, weight: float) -> None:
        self._messages.subtract(x, key, weight)

    def mean(self, out: Tensor, key: Key) -> None:
        exchange, messages = self._exchange, self._messages
        received = exchange.all_to_all(messages.outgoing, messages.sizes, messages.arriving)
        with span("decode") if profiler._is_profiler_enabled else OFF:
            # In rank order on every rank, as in AllGatherRoute.
            messages.mean(received, out, key, exchange.world_size)

    def _write(self, x: Tensor, index: Tensor, key: Key, subtract: bool) -> None:
        # First exchange how many entries there are in each piece of the shards. Indices ascend, and
        # so do pieces: the entries of each are one slice.
        mine = torch.diff(torch.searchsorted(index, self._starts, out_int32=True))
        theirs = self._exchange.all_to_all(mine, self._pieces, self._arriving)
        self._messages.begin(mine, theirs)
        self._messages.write(x, index, key, subtract)


class _ExactDownlink:
    """Entries that all owners together select from the whole bucket."""

    def __init__(self, bucket: Prepared, down: Direction) -> None:
        self._bucket, self._exchange = bucket, bucket.exchange
        rank, ranks = self._exchange.rank, range(self._exchange.world_size)
        self._messages = _messages(bucket, down, [rank], ranks)
        if isinstance(self._messages, Messages):
            self._search: Any = HostSearch(down, self._exchange, bucket.device)
        else:
            self._search = self._messages.search(
                [down.place(v, rank) for v in range(len(down.kept))],
                [piece.vector + o * len(down.kept) for o in ranks for piece in down.pieces[o]],
                down.sizes,
                down.searched,
                self._exchange,
                bucket.device,
            )
        before = sum(len(own) for own in down.pieces[:rank])
        self._own = slice(before, before + len(down.pieces[rank]))

    def encode(self, mean: Tensor, key: Key) -> None:
        e, x = self._bucket.open("server_error")
        index, counts = self._search(mean, e, x, *self._bucket.open("thresholds"))
        self._messages.begin(counts[self._own], counts)
        self._messages.write(x, index, key, True)

    def mean(self, out: Tensor, key: Key) -> None:
        messages = self._messages
        received = self._exchange.all_gather_v(messages.outgoing, messages.arriving)
        with span("decode") if profiler._is_profiler_enabled else OFF:
            messages.mean(received, out, key, 1)


class Messages:
    """Messages of counted entries in plain torch or, on a CPU, in Numba: a frame for each owner.

    This rank sends and reads entries of the shards of the owners `sends` and `reads`, in frames of
    `sizes` and `arriving` bytes.
    """

    def __init__(
        self, direction: Direction, sends: Sequence[int], reads: Sequence[int], bucket: Prepared
    ) -> None:
        self._direction, self._device, self._exchange = direction, bucket.device, bucket.exchange
        self._sends, self._reads = sends, reads

    def begin(self, mine: Tensor, theirs: Tensor) -> None:
        """Prepare the messages of this step. The host waits for all counts together."""
        numbers = torch.cat([mine, theirs]).tolist()
        up, sent = self._direction.role == "up", mine.numel()
        self._written = self._codec(self._sends, numbers[:sent], up)
        self._read = self._codec(self._reads, numbers[sent:], not up)
        self.sizes, self.arriving = self._written.frames.sizes, self._read.frames.sizes

    def _codec(self, owners: Sequence[int], counts: Sequence[int], in_bucket: bool) -> Codec:
        direction, rest = self._direction, iter(counts)
        vectors: list[Vector] = []
        numbers, signatures = [], []
        for owner in owners:
            own = list(islice(rest, len(direction.pieces[owner])))
            found = direction.counted(owner, own, in_bucket)
            vectors += found
            numbers.append(len(found))
            signatures.append(counted_signature(direction.signatures[owner], own))
        dtype, checksum = direction.shape.dtype, self._exchange.checksum
        return Codec(vectors, self._device, dtype, numbers, checksum, signatures)

    def write(self, x: Tensor, index: Tensor, key: Key, subtract: bool) -> None:
        """Write the frames with the entries of `x` at `index`."""
        codec, self._message = self._written, Encoded(())
        if codec.vectors:
            index = index[: sum(segment.k for segment in codec.vectors.segments)]
            values = narrow(x, codec.vectors.dtype)
            selector = self._direction.compressor
            message = selector.encode_selected(values, index, codec.vectors, key)
            self._message = codec.pack(message)
        self.outgoing = codec.frames.outgoing
        if subtract:
            self.subtract(x, key, 1.0)

    def subtract(self, x: Tensor, key: Key, weight: float) -> None:
        """Subtract `weight` times the message that was written from `x`."""
        self._written.subtract(self._message, x, key, weight)

    def mean(self, received: Tensor, out: Tensor, key: Key, divisor: int) -> None:
        """Check received frames, and write their sum, divided by `divisor`, to `out`."""
        rows, exchange = received.view(1, -1), self._exchange
        exchange.check(self._read.frames, rows, range(exchange.world_size))
        self._read.mean_of(rows, out, key, divisor)


def _messages(
    bucket: Prepared, direction: Direction, sends: Sequence[int], reads: Sequence[int]
) -> Any:
    """Return the fastest form of :class:`Messages` for a bucket."""
    exchange, shape = bucket.exchange, direction.shape
    form, fmt = direction.compressor.counted_form(bucket.device)
    dtypes = {shape.dtype, *(s.dtype for s in bucket.slots.values() if s.kind is not Kind.CACHE)}
    if (
        form is None
        or exchange.checksum
        or shape.numel >= form.LIMIT
        or not dtypes <= {*form.DTYPES}
    ):
        return Messages(direction, sends, reads, bucket)
    up = direction.role == "up"
    return form.Counted(
        fmt,
        [direction.places(owner, up) for owner in sends],
        [direction.places(owner, not up) for owner in reads],
        [direction.signatures[owner] for owner in (*sends, *reads)],
        len(reads) if up else 1,
        max((k / n for k, n in zip(direction.kept, direction.sizes, strict=True) if n), default=0),
        shape.dtype,
        exchange,
        bucket.device,
        not up,
    )
