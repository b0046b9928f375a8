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

from torchcomp import host
from torchcomp.bucket import BucketShape, Shard
from torchcomp.codec import Codec, vectors_of
from torchcomp.compressors import Compressor
from torchcomp.compressors.base import Encoded, Vector, Vectors
from torchcomp.compressors.sparse import Selector
from torchcomp.exchange import Exchange
from torchcomp.kernels.cast import narrow
from torchcomp.kernels.segments import joined
from torchcomp.keys import Key
from torchcomp.profiling import label
from torchcomp.routes.base import received
from torchcomp.routes.threshold import Query, chosen, find_largest, order_bits
from torchcomp.state import Slot, State

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
        self,
        vectors: Sequence[Vector],
        device: torch.device,
        counts: Sequence[int] | None = None,
    ) -> Codec:
        """Return a codec of vectors of the bucket or of a shard; for `counts`, see `Codec`."""
        return Codec(Vectors(vectors, device, self.shape.dtype), counts)

    def codec_of_owners(self, shards: Sequence[Sequence[Vector]], device: torch.device) -> Codec:
        """Return the codec of the whole bucket with a frame for each owner, from the shards'."""
        vectors = [
            replace(v, span=slice(part.start + v.span.start, part.start + v.span.stop))
            for part, own in zip(self.shards, shards, strict=True)
            for v in own
        ]
        return self.codec(vectors, device, [len(own) for own in shards])

    def counted(self, owner: int, counts: Sequence[int]) -> list[Vector]:
        """Return the vectors of a shard with `counts` entries, one count for each of its pieces."""
        vectors = []
        for piece, count in zip(self.pieces[owner], counts, strict=True):
            if count:  # a compressor keeps at least one entry, so an empty piece has no vector
                exactly = self.selector.exactly(count)
                layout = exactly.layout(piece.stop - piece.start, self.shape.dtype)
                vectors.append(Vector(piece.name, piece.span, exactly, layout))
        return vectors


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
        up: how entries are encoded for the owners.
        down: how the owners encode the mean.
        exchange: the collectives of the group.
        key: key of the encodings.
        state: stores the server residual and the workspace of the encodings.
        dtype: dtype of the owner's sum.
        server: slot of the server residual. If None, the downlink has no error feedback.
        thresholds: slot of the previous step's thresholds, for an exact downlink.
    """

    def __init__(
        self,
        up: Direction,
        down: Direction,
        exchange: Exchange,
        key: Key,
        state: State,
        dtype: torch.dtype,
        server: Slot | None = None,
        thresholds: Slot | None = None,
    ) -> None:
        self._up, self._down, self._exchange, self._key = up, down, exchange, key
        self._state, self._dtype, self._server, self._thresholds = state, dtype, server, thresholds

    @label("encode")
    def send(self, x: Tensor) -> None:
        up, whole = self._up, self._whole(self._up, x.device)
        if up.exact:
            self._send_selected(x, up.selector.select(x, whole.vectors))
        else:
            self._pack_fixed(whole, whole.encode(x, self._key), x.device)

    @label("encode")
    def send_sum(self, g: Tensor, e: Tensor, rest: Tensor) -> None:
        up, whole = self._up, self._whole(self._up, g.device)
        if up.exact:
            self._send_selected(rest, up.selector.select_sum(g, e, rest, whole.vectors))
            self.sent(rest, -1.0)
        else:
            self._pack_fixed(whole, whole.encode_sum(g, e, rest, self._key), g.device)

    def sent(self, out: Tensor, weight: float = 1.0) -> None:
        self._codec.subtract(self._message, out, self._key, -weight)

    def mean(self, out: Tensor) -> None:
        exchange = self._exchange
        codec, frame = self._downlink(self._collect(out.device))
        # Messages of different lengths need `all_gather_v`, which copies the frame for each rank.
        if len(set(codec.sizes)) == 1:
            frames = exchange.all_gather(frame)
        else:
            frames = exchange.all_gather_v(frame, codec.sizes)
        with label("decode"):
            messages = received(codec, exchange, range(exchange.world_size), frames)
            codec.mean(messages, out, self._key, 1)

    def _whole(self, direction: Direction, device: torch.device) -> Codec:
        """Return the codec of the whole bucket; if not `exact`, with a frame for each owner."""

        def make() -> Codec:
            if direction.exact:
                return direction.codec(direction.whole, device)
            return direction.codec_of_owners(direction.fixed, device)

        return self._state.scratch(("whole", direction), make)

    def _own(self, direction: Direction, device: torch.device) -> Codec:
        """Return the codec of this rank's shard, if it is compressed separately."""
        own = direction.fixed[self._exchange.rank]
        return self._state.scratch(("own", direction), lambda: direction.codec(own, device))

    def _pack_fixed(self, codec: Codec, message: Encoded, device: torch.device) -> None:
        world_size = self._exchange.world_size
        self._arriving = self._own(self._up, device)
        self._arriving_sizes = [self._arriving.framed] * world_size
        self._pack(codec, message, device)

    def _send_selected(self, x: Tensor, index: Tensor) -> None:
        """Encode entries of the bucket, selected from whole vectors, as one message per shard."""
        up, rank = self._up, self._exchange.rank
        counts, arriving = self._exchange_counts(index)
        rows = iter(counts)
        shards = [up.counted(o, list(islice(rows, len(p)))) for o, p in enumerate(up.pieces)]
        theirs = [up.counted(rank, row) for row in arriving]
        # One codec for the messages of all ranks, with a frame each.
        vectors = [vector for own in theirs for vector in own]
        self._arriving = up.codec(vectors, x.device, [len(own) for own in theirs])
        self._arriving_sizes = self._arriving.sizes
        codec = up.codec_of_owners(shards, x.device)
        self._pack(codec, self._encode_selected(codec, x, index), x.device)

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
        own = len(up.pieces[exchange.rank])
        received = exchange.all_to_all(
            mine, [len(pieces) for pieces in up.pieces], [own] * exchange.world_size
        )
        # The host needs the counts for the lengths of the messages. It waits once for all of them.
        numbers = torch.cat([mine, *received]).tolist()
        theirs = numbers[len(starts) :]
        arriving = [theirs[own * r : own * (r + 1)] for r in range(exchange.world_size)]
        return numbers[: len(starts)], arriving

    def _pack(self, codec: Codec, message: Encoded, device: torch.device) -> None:
        # Pack now: the message can be a view of `x`, which the caller changes next.
        self._codec, self._message = codec, message
        self._outgoing = torch.empty(codec.framed, dtype=torch.uint8, device=device)
        codec.pack(message, self._outgoing)

    def _collect(self, device: torch.device) -> Tensor:
        """Receive all ranks' entries of this rank's shard, and return their mean."""
        exchange, arriving = self._exchange, self._arriving
        frames = exchange.all_to_all(self._outgoing, self._codec.sizes, self._arriving_sizes)
        part, ranks = self._up.shards[exchange.rank], exchange.world_size
        total = torch.empty(part.stop - part.start, dtype=self._dtype, device=device)
        with label("decode"):
            messages = received(arriving, exchange, range(ranks), frames)
            arriving.mean(messages, total, self._key, ranks)
        return total

    @label("encode downlink")
    def _downlink(self, mean: Tensor) -> tuple[Codec, Tensor]:
        """Return the codec of all owners' downlink messages, and this owner's framed message."""
        down, rank, key, device = self._down, self._exchange.rank, self._key, mean.device
        dtype = down.shape.dtype
        if self._server is None:  # no error feedback on the downlink
            codec = self._own(down, device)
            message = codec.encode(narrow(mean, dtype), key)
        else:
            e, x = self._state.open(self._server, device)
            if down.exact:
                shards, index = self._select(mean, e, x)
                codec = down.codec(shards[rank], device)
                message = self._encode_selected(codec, x, index)
                codec.subtract(message, x, key)
            else:
                codec = self._own(down, device)
                message = codec.encode_sum(mean, e, x, key)
        frame = torch.empty(codec.framed, dtype=torch.uint8, device=device)
        codec.pack(message, frame)
        if self._server is not None and down.exact:
            return down.codec_of_owners(shards, device), frame
        return self._whole(down, device), frame

    def _select(self, mean: Tensor, e: Tensor, x: Tensor) -> tuple[list[list[Vector]], Tensor]:
        """Write ``mean + e`` to `x`, and select from the whole bucket, together with all owners.

        Returns:
            The vectors of all owners' messages, and the indices of this owner's entries in `x`.
        """
        down, rank = self._down, self._exchange.rank
        # On the CPU, because the search compares the thresholds on the host.
        before, after = self._state.open(self._thresholds, torch.device("cpu"))  # type: ignore[arg-type]
        # Candidates: no more of a vector than are kept, and than there are in this shard.
        counts = [down.candidates[piece.vector][rank] for piece in down.pieces[rank]]
        candidates = self._state.scratch(
            ("candidates", down), lambda: down.codec(down.counted(rank, counts), mean.device)
        )
        if candidates.vectors:
            index = down.selector.select_sum(mean, e, x, candidates.vectors)
        else:
            index = torch.arange(0, device=mean.device)
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
        shards = [
            down.counted(owner, [found[piece.vector].counts[owner] for piece in pieces])
            for owner, pieces in enumerate(down.pieces)
        ]
        return shards, joined(indices or [index])

    def _encode_selected(self, codec: Codec, x: Tensor, index: Tensor) -> Encoded:
        if not codec.vectors:
            return Encoded((), index)
        # The next step will need other numbers of draws: draw nothing ahead.
        key = replace(self._key, ahead=None)
        selector: Selector = codec.vectors.compressor  # type: ignore[assignment]
        return selector.encode_selected(x, index, codec.vectors, key)
