"""ShardedRoute: send entries to the rank that owns their shard of a bucket, and send back the mean.

Every rank owns one shard, a contiguous part of the bucket, and is its parameter server. A step is
straight-line code:

1. up:   all-to-all; every rank sends each owner the entries in that owner's shard
2. own:  the owner averages them in rank order and adds its server residual, if there is one
3. down: all-gather; the owners send their downlink messages to all ranks

The traffic of a rank does not grow with the number of ranks. If shards are compressed separately,
messages have fixed sizes. A selection from the whole bucket ("exact") can put any number of entries
into a shard. The ranks then exchange these counts first. For an exact downlink, the owners also
search for a common threshold (threshold.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice

import torch
from torch import Tensor
from torch.autograd import profiler

from torchcomp import host
from torchcomp.bucket import BucketShape, Shard
from torchcomp.codec import Codec, vectors_of
from torchcomp.compressors import Compressor
from torchcomp.compressors.base import Encoded, Vector, Vectors
from torchcomp.compressors.sparse import Selector
from torchcomp.kernels.cast import narrow
from torchcomp.kernels.segments import joined
from torchcomp.keys import Key
from torchcomp.prepared import Prepared
from torchcomp.profiling import OFF, span
from torchcomp.routes.threshold import Query, chosen, find_largest, order_bits

_END = 2**63 - 1
"""Above every index."""


@dataclass(frozen=True)
class Piece:
    """The elements of one vector that belong to one shard."""

    vector: int  # index of the vector in the bucket's codec
    name: str  # names the vector and the start of the piece; part of the key
    start: int  # first element within the shard
    stop: int  # one past the last element

    @property
    def span(self) -> slice:
        """The piece's elements within the shard."""
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class Direction:
    """How one bucket's shards are encoded for the uplink or the downlink.

    Everything here depends only on the bucket's shape, so it is computed once per shape.
    """

    role: str  # "up" or "down"; part of the key, so that the two draw different random numbers
    compressor: Compressor
    exact: bool  # whether entries are selected from whole vectors of the bucket
    shape: BucketShape  # shape of the bucket, with the dtype of the values on the wire
    world_size: int

    @property
    def selector(self) -> Selector:
        """The compressor, if `exact`."""
        return self.compressor  # type: ignore[return-value]

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The bucket's shards, by owner."""
        return self.shape.shards(self.world_size)

    @cached_property
    def whole(self) -> tuple[Vector, ...]:
        """The vectors of the whole bucket."""
        return vectors_of(self.compressor, self.shape.names, self.shape.sizes, self.shape.dtype)

    @cached_property
    def fixed(self) -> list[tuple[Vector, ...]]:
        """By owner, the vectors of a shard that is compressed separately."""
        # The names are part of the key. Two shards of one parameter then draw different numbers.
        return [
            vectors_of(
                self.compressor,
                tuple(f"{self.role} {name} from {part.start}" for name in part.names),
                part.sizes,
                self.shape.dtype,
            )
            for part in self.shards
        ]

    @cached_property
    def pieces(self) -> list[list[Piece]]:
        """By owner, the pieces of the bucket's vectors in that owner's shard."""
        cut: list[list[Piece]] = []
        for part in self.shards:
            cut.append([])
            for i, vector in enumerate(self.whole):
                start, stop = max(vector.span.start, part.start), min(vector.span.stop, part.stop)
                if start < stop:
                    name = f"{self.role} {vector.name} from {part.start}"
                    cut[-1].append(Piece(i, name, start - part.start, stop - part.start))
        return cut

    @cached_property
    def widths(self) -> list[list[int]]:
        """By vector, the number of its elements in each shard."""
        table = [[0] * self.world_size for _ in self.whole]
        for owner, pieces in enumerate(self.pieces):
            for piece in pieces:
                table[piece.vector][owner] = piece.stop - piece.start
        return table

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """By vector of the whole bucket, the number of its elements."""
        return tuple(vector.span.stop - vector.span.start for vector in self.whole)

    @cached_property
    def kept(self) -> list[int]:
        """By vector of the whole bucket, the number of entries to keep."""
        return [self.compressor.kept(size) for size in self.sizes]

    @cached_property
    def candidates(self) -> list[list[int]]:
        """By vector, the number of candidates that each owner contributes to the search."""
        # The k largest of a vector can all be in one shard, but no owner needs more than k.
        return [
            [min(kept, width) for width in widths]
            for kept, widths in zip(self.kept, self.widths, strict=True)
        ]

    def codec(
        self, by_owner: Sequence[Sequence[Vector]], device: torch.device, checksum: bool
    ) -> Codec:
        """Return the codec of the whole bucket, with a frame for each owner.

        Args:
            by_owner: the vectors of each shard, within the shard.
            device: device of the bucket.
            checksum: whether frames have a checksum.
        """
        vectors = [
            replace(v, span=slice(part.start + v.span.start, part.start + v.span.stop))
            for part, own in zip(self.shards, by_owner, strict=True)
            for v in own
        ]
        return Codec(vectors, device, self.shape.dtype, [len(own) for own in by_owner], checksum)

    def counted(self, owner: int, counts: Sequence[int]) -> tuple[Vector, ...]:
        """Return the vectors of a shard with `counts` entries, one count for each of its pieces."""
        vectors = []
        for piece, count in zip(self.pieces[owner], counts, strict=True):
            if count:  # a compressor keeps at least one entry, so an empty piece has no vector
                exactly = self.selector.exactly(count)
                layout = exactly.layout(piece.stop - piece.start, self.shape.dtype)
                vectors.append(Vector(piece.name, piece.span, exactly, layout))
        return tuple(vectors)


@lru_cache(maxsize=1024)
def direction(
    role: str, compressor: Compressor, selection: str, shape: BucketShape, world_size: int
) -> Direction:
    """Return the :class:`Direction` of a role, "up" or "down".

    Args:
        role: "up" or "down".
        compressor: compressor of this direction.
        selection: "exact" or "shard".
        shape: shape of the bucket, with the dtype of the values on the wire.
        world_size: number of ranks.
    """
    # An elementwise compressor gives the same result for shards as for the whole bucket.
    exact = selection == "exact" and compressor.selects
    return Direction(role, compressor, exact, shape, world_size)


class ShardedRoute:
    """Exchange of one bucket through the owners of its shards. See :class:`.base.Route`.

    Args:
        bucket: with the slots "server_error" and "thresholds", if the downlink has error feedback
            and an exact selection.
        up: how entries are encoded for the owners.
        down: how the owners encode the mean.
        dtype: dtype of the owner's sum.
    """

    def __init__(
        self, bucket: Prepared, up: Direction, down: Direction, dtype: torch.dtype
    ) -> None:
        self._bucket, self._up, self._down = bucket, up, down
        self._exchange = exchange = bucket.exchange
        self._rank, self._ranks = exchange.rank, range(exchange.world_size)
        self._device, self._checksum = bucket.device, exchange.checksum
        self._feedback = "server_error" in bucket.slots
        own = up.shards[self._rank]
        self._total = torch.empty(own.stop - own.start, dtype=dtype, device=self._device)
        if up.exact:
            # Selects from whole vectors. Its messages have other lengths in every step.
            self._selects = Vectors(up.whole, self._device, up.shape.dtype)
        else:
            self._outgoing = up.codec(up.fixed, self._device, self._checksum)
            fixed = up.fixed[self._rank]
            self._arriving = Codec(fixed, self._device, up.shape.dtype, None, self._checksum)
        if down.exact and self._feedback:
            self._prepare_search()
        else:
            fixed = down.fixed[self._rank]
            self._downlink = Codec(fixed, self._device, down.shape.dtype, None, self._checksum)
            self._everyone = down.codec(down.fixed, self._device, self._checksum)

    # --- Up ---

    def send(self, x: Tensor, key: Key) -> None:
        with span("encode") if profiler._is_profiler_enabled else OFF:
            self._key = key
            if self._up.exact:
                index = self._up.selector.select(x, self._selects) if self._selects else _none(x)
                self._send_selected(x, index)
            else:
                self._message = self._outgoing.encode(x, key)

    def send_sum(self, g: Tensor, e: Tensor, rest: Tensor, key: Key) -> None:
        with span("encode") if profiler._is_profiler_enabled else OFF:
            self._key = key
            if self._up.exact:
                index = _none(g)  # of a bucket without elements
                if self._selects:
                    index = self._up.selector.select_sum(g, e, rest, self._selects)
                self._send_selected(narrow(rest, g.dtype), index)
                self._outgoing.subtract(self._message, rest, key)
            else:
                self._message = self._outgoing.encode_sum(g, e, rest, key)

    def sent(self, out: Tensor) -> None:
        self._outgoing.subtract(self._message, out, self._key, -1.0)

    def mean(self, out: Tensor) -> None:
        exchange = self._exchange
        self._collect()
        codec, memory = self._encode_downlink()
        sizes = codec.frames.sizes
        # Messages of different lengths need `all_gather_v`, which copies the frame for each rank.
        if len(set(sizes)) == 1:
            received = exchange.all_gather_rows(memory).view(-1)
        else:
            received = exchange.all_gather_v(memory, sizes)
        exchange.check(codec.frames, received.view(1, -1), self._ranks)
        with span("decode") if profiler._is_profiler_enabled else OFF:
            codec.mean_of(received.view(1, -1), out, self._key, 1)

    def _send_selected(self, x: Tensor, index: Tensor) -> None:
        """Encode entries of the bucket, selected from whole vectors, as one message per shard."""
        up = self._up
        counts, arriving = self._exchange_counts(index)
        rows = iter(counts)
        by_owner = [up.counted(o, list(islice(rows, len(p)))) for o, p in enumerate(up.pieces)]
        self._outgoing = up.codec(by_owner, self._device, self._checksum)
        # All ranks' vectors one after another: those of different ranks overlap.
        own = [up.counted(self._rank, row) for row in arriving]
        vectors, numbers = [v for each in own for v in each], [len(each) for each in own]
        self._arriving = Codec(vectors, self._device, up.shape.dtype, numbers, self._checksum)
        self._message = self._encode_selected(self._outgoing, x, index)

    def _exchange_counts(self, index: Tensor) -> tuple[list[int], list[list[int]]]:
        """Exchange how many entries there are in each piece of the shards.

        Returns:
            The number of entries in each piece of all shards; and from each rank, the numbers for
            the pieces of this rank's shard.
        """
        up, exchange = self._up, self._exchange
        starts = [
            part.start + piece.start
            for part, pieces in zip(up.shards, up.pieces, strict=True)
            for piece in pieces
        ]
        # Indices ascend, and so do pieces: the entries of each are one slice.
        cuts = torch.searchsorted(index, host.copy_to(torch.tensor([*starts, _END]), index.device))
        mine = torch.diff(cuts).int()
        own = len(up.pieces[self._rank])
        received = exchange.all_to_all(
            mine, [len(pieces) for pieces in up.pieces], [own] * len(self._ranks)
        )
        # The host needs the counts for the lengths of the messages. It waits once for all of them.
        numbers = torch.cat([mine, received]).tolist()
        theirs = numbers[len(starts) :]
        arriving = [theirs[own * r : own * (r + 1)] for r in self._ranks]
        return numbers[: len(starts)], arriving

    # --- The owner ---

    def _collect(self) -> None:
        """Receive all ranks' entries of this rank's shard, and average them."""
        exchange, arriving = self._exchange, self._arriving.frames
        frames, ranks = self._outgoing.frames, len(self._ranks)
        sizes = arriving.sizes if self._up.exact else arriving.sizes * ranks
        received = exchange.all_to_all(frames.outgoing(), frames.sizes, sizes)
        rows = 1 if self._up.exact else ranks
        received = received.view(rows, arriving.nbytes)
        exchange.check(arriving, received, self._ranks)
        with span("decode") if profiler._is_profiler_enabled else OFF:
            # In rank order on every rank, as in AllGatherRoute.
            self._arriving.mean_of(received, self._total, self._key, ranks)

    # --- Down ---

    def _encode_downlink(self) -> tuple[Codec, Tensor]:
        """Return the codec of all owners' downlink messages, and this owner's framed message."""
        mean, key = self._total, self._key
        with span("encode downlink") if profiler._is_profiler_enabled else OFF:
            if not self._feedback:
                self._downlink.encode(narrow(mean, self._down.shape.dtype), key)
            elif self._down.exact:
                return self._encode_searched(mean)
            else:
                e, rest = self._bucket.open("server_error")
                self._downlink.encode_sum(mean, e, rest, key)
            return self._everyone, self._downlink.frames.outgoing()

    def _prepare_search(self) -> None:
        down = self._down
        # Candidates: no more of a vector than are kept, and than there are in this shard.
        candidates = []
        for piece in down.pieces[self._rank]:
            count = down.candidates[piece.vector][self._rank]
            exactly = down.selector.exactly(count)
            layout = exactly.layout(piece.stop - piece.start, down.shape.dtype)
            candidates.append(Vector(piece.name, piece.span, exactly, layout))
        self._candidates = Vectors(candidates, self._device, down.shape.dtype)

    def _encode_searched(self, mean: Tensor) -> tuple[Codec, Tensor]:
        """Select from the whole bucket, together with all owners, and encode this owner's part."""
        down, rank = self._down, self._rank
        e, x = self._bucket.open("server_error")
        by_owner, index = self._search(mean, e, x)
        own = Codec(by_owner[rank], self._device, down.shape.dtype, None, self._checksum)
        message = self._encode_selected(own, narrow(x, down.shape.dtype), index)
        own.subtract(message, x, self._key)
        return down.codec(by_owner, self._device, self._checksum), own.frames.outgoing()

    def _search(
        self, mean: Tensor, e: Tensor, x: Tensor
    ) -> tuple[list[tuple[Vector, ...]], Tensor]:
        """Write ``mean + e`` to `x`, and select from the whole bucket, together with all owners.

        Returns:
            The vectors of all owners' messages, and the indices of this owner's entries in `x`.
        """
        down, rank = self._down, self._rank
        # On the CPU, because the search compares the thresholds on the host.
        slot = self._bucket.slots["thresholds"]
        before, after = self._bucket.state.open(slot, torch.device("cpu"))
        index = _none(x)  # a shard can be empty
        if self._candidates:
            index = down.selector.select_sum(mean, e, x, self._candidates)
        # A vector without elements in this shard still needs a query: all ranks take part in the
        # search of every vector.
        counts = [sizes[rank] for sizes in down.candidates]
        local = torch.split(index, counts)
        bits = torch.split(order_bits(x.index_select(0, index)), counts)
        asked = zip(bits, down.candidates, down.kept, before.tolist(), strict=True)
        queries = [Query(*each) for each in asked]
        found = find_largest(self._exchange, queries)
        after.copy_(torch.tensor([selection.threshold for selection in found]))
        indices = [
            at.index_select(0, chosen(each, selection.threshold, selection.counts[rank]))
            for at, each, selection in zip(local, bits, found, strict=True)
        ]
        by_owner = [
            down.counted(owner, [found[piece.vector].counts[owner] for piece in pieces])
            for owner, pieces in enumerate(down.pieces)
        ]
        return by_owner, joined(indices or [index])

    def _encode_selected(self, codec: Codec, x: Tensor, index: Tensor) -> Encoded:
        if not len(codec.vectors):
            return Encoded(())
        # The next step will need other numbers of draws: draw nothing ahead.
        key, selector = replace(self._key, ahead=None), self._up.selector
        if codec is not self._outgoing:
            selector = self._down.selector
        return codec.pack(selector.encode_selected(x, index, codec.vectors, key))


def _none(like: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.int64, device=like.device)
