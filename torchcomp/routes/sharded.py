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
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby

import torch
from torch import Tensor

from torchcomp.bucket import BucketShape, Shard
from torchcomp.codec import Codec, Message, Vector, codec
from torchcomp.compressors import Compressor
from torchcomp.compressors.sparse import Selector
from torchcomp.exchange import Exchange
from torchcomp.kernels.cast import narrow
from torchcomp.keys import Key
from torchcomp.profiling import label
from torchcomp.routes.base import add_frames
from torchcomp.routes.threshold import Query, chosen, find_largest, order_bits
from torchcomp.state import Slot, State


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
    def whole(self) -> Codec:
        """The codec of the whole bucket."""
        return codec(self.compressor, self.shape.names, self.shape.sizes, self.shape.dtype)

    @cached_property
    def fixed(self) -> list[Codec]:
        """By owner, the codec of a shard that is compressed separately."""
        # The names are part of the key. Two shards of one parameter then draw different numbers.
        return [
            codec(
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
            for i, vector in enumerate(self.whole.vectors):
                start, stop = max(vector.span.start, part.start), min(vector.span.stop, part.stop)
                if start < stop:
                    name = f"{self.role} {vector.name} from {part.start}"
                    cut[-1].append(Piece(i, name, start - part.start, stop - part.start))
        return cut

    @cached_property
    def widths(self) -> list[list[int]]:
        """By vector, the number of its elements in each shard."""
        table = [[0] * self.world_size for _ in self.whole.vectors]
        for owner, pieces in enumerate(self.pieces):
            for piece in pieces:
                table[piece.vector][owner] = piece.stop - piece.start
        return table

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """By vector of the whole bucket, the number of its elements."""
        return tuple(vector.span.stop - vector.span.start for vector in self.whole.vectors)

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

    def counted(self, owner: int, counts: Sequence[int]) -> Codec:
        """Return the codec of a shard with `counts` entries, one count for each of its pieces."""
        vectors = []
        for piece, count in zip(self.pieces[owner], counts, strict=True):
            if count:  # a compressor keeps at least one entry, so an empty piece has no vector
                exactly = self.selector.exactly(count)
                layout = exactly.layout(piece.stop - piece.start, self.shape.dtype)
                vectors.append(Vector(piece.name, piece.span, exactly, layout))
        return Codec(tuple(vectors))

    def encode_selected(
        self, shard: Codec, x: Tensor, chosen: Sequence[Tensor], key: Key
    ) -> Message:
        """Return the message of a shard with the entries `chosen`, vector by vector."""
        return [
            v.compressor.encode_selected(x[v.span], index, key.of_tensor(v.name))  # type: ignore[attr-defined]
            for v, index in zip(shard.vectors, chosen, strict=True)
        ]


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
        if self._up.exact:
            self._send_selected(x, [v.compressor.select(x[v.span]) for v in self._up.whole.vectors])  # type: ignore[attr-defined]
            return
        self._codecs = self._up.fixed
        shards = zip(self._codecs, self._up.shards, strict=True)
        self._pack([c.encode(x[part.span], self._key) for c, part in shards], x.device)

    @label("encode")
    def send_sum(self, g: Tensor, e: Tensor, x: Tensor) -> None:
        up, key, state = self._up, self._key, self._state
        if up.exact:
            scratch = state.scratch(("up", up), up.whole.scratch)
            chosen = [
                v.compressor.select_sum(g[v.span], e[v.span], x[v.span], s)  # type: ignore[attr-defined]
                for v, s in zip(up.whole.vectors, scratch, strict=True)
            ]
            self._send_selected(narrow(x, g.dtype), chosen)
            return
        self._codecs = up.fixed
        messages = []
        for owner, (c, part) in enumerate(zip(self._codecs, up.shards, strict=True)):
            own, scratch = part.span, state.scratch(("up", owner, up), c.scratch)
            messages.append(c.encode_sum(g[own], e[own], x[own], key, scratch, g.dtype))
        self._pack(messages, x.device)

    def sent(self, out: Tensor, weight: float = 1.0) -> None:
        for c, part, message in zip(self._codecs, self._up.shards, self._messages, strict=True):
            c.subtract(message, out[part.span], self._key, -weight)

    def mean(self, out: Tensor) -> None:
        total = self._collect(out.device).div_(self._exchange.world_size)
        codecs, frame = self._downlink(total)
        sizes = [c.framed for c in codecs]
        # Messages of different lengths need `all_gather_v`, which copies the frame for each rank.
        if len(set(sizes)) == 1:
            frames = self._exchange.all_gather(frame)
        else:
            frames = self._exchange.all_gather_v(frame, sizes)
        out.zero_()
        for owner, (c, part) in enumerate(zip(codecs, self._down.shards, strict=True)):
            add_frames(c, self._exchange, [(owner, frames[owner])], out[part.span], self._key)

    def _send_selected(self, x: Tensor, selections: Sequence[Tensor]) -> None:
        """Encode one message per shard from selections of the whole bucket."""
        up = self._up
        # (owner, vector) -> selected positions within the owner's shard.
        local: dict[tuple[int, int], Tensor] = {}
        for i, (vector, index) in enumerate(zip(up.whole.vectors, selections, strict=True)):
            # Selected positions are sorted, so each shard's entries are one slice of them.
            first = vector.span.start
            cuts = torch.tensor([part.start - first for part in up.shards[1:]])
            stops = torch.searchsorted(index, cuts.to(index)).tolist()
            for owner, part_index in enumerate(torch.tensor_split(index, stops)):
                local[owner, i] = part_index + (first - up.shards[owner].start)
        self._counts = [
            [local[owner, p.vector].numel() for p in pieces]
            for owner, pieces in enumerate(up.pieces)
        ]
        self._codecs = [up.counted(owner, row) for owner, row in enumerate(self._counts)]
        messages = []
        for owner, (c, part) in enumerate(zip(self._codecs, up.shards, strict=True)):
            own = [local[owner, p.vector] - p.start for p in up.pieces[owner]]
            chosen = [index for index in own if index.numel()]
            messages.append(up.encode_selected(c, x[part.span], chosen, self._key))
        self._pack(messages, x.device)

    def _pack(self, messages: list[Message], device: torch.device) -> None:
        self._messages = messages
        self._sizes = [c.framed for c in self._codecs]
        self._outgoing = torch.empty(sum(self._sizes), dtype=torch.uint8, device=device)
        frames = torch.split(self._outgoing, self._sizes)
        for c, message, frame in zip(self._codecs, messages, frames, strict=True):
            c.pack(message, frame)

    def _collect(self, device: torch.device) -> Tensor:
        """Receive all ranks' entries of this rank's shard, and return their sum."""
        exchange, up, rank = self._exchange, self._up, self._exchange.rank
        arriving = [up.fixed[rank]] * exchange.world_size
        if up.exact:
            # The receiver needs the counts to know the lengths of the messages, so send them first.
            outgoing = [count for row in self._counts for count in row]
            counts = exchange.all_to_all(
                torch.tensor(outgoing, dtype=torch.int32, device=exchange.device),
                [len(row) for row in self._counts],
                [len(self._counts[rank])] * exchange.world_size,
            )
            arriving = [up.counted(rank, row.tolist()) for row in counts]
        frames = exchange.all_to_all(self._outgoing, self._sizes, [c.framed for c in arriving])
        part = up.shards[rank]
        total = torch.zeros(part.stop - part.start, dtype=self._dtype, device=device)
        senders = zip(arriving, enumerate(frames), strict=True)
        # Add consecutive messages with the same codec in one call. These are all messages, unless
        # the up direction is exact. `groupby` keeps the rank order.
        for _, run in groupby(senders, key=lambda sender: id(sender[0])):
            codecs, held = zip(*run, strict=True)
            add_frames(codecs[0], exchange, held, total, self._key)
        return total

    @label("encode downlink")
    def _downlink(self, mean: Tensor) -> tuple[Sequence[Codec], Tensor]:
        """Return the codecs of all owners' downlink messages, and this owner's framed message."""
        down, rank, key = self._down, self._exchange.rank, self._key
        codecs, dtype = down.fixed, down.shape.dtype
        x = mean
        if self._server is None:  # no error feedback on the downlink
            message = codecs[rank].encode(narrow(mean, dtype), key)
        else:
            e, x = self._state.open(self._server, mean.device)
            if down.exact:
                codecs, selections = self._select(mean, e, x)
                message = down.encode_selected(codecs[rank], narrow(x, dtype), selections, key)
            else:
                scratch = self._state.scratch(("down", down), codecs[rank].scratch)
                message = codecs[rank].encode_sum(mean, e, x, key, scratch, dtype)
        frame = torch.empty(codecs[rank].framed, dtype=torch.uint8, device=mean.device)
        # Pack before the subtraction below: the message can be a view of `x`.
        codecs[rank].pack(message, frame)
        if self._server is not None:
            codecs[rank].subtract(message, x, key)
        return codecs, frame

    def _select(self, mean: Tensor, e: Tensor, x: Tensor) -> tuple[list[Codec], list[Tensor]]:
        """Write ``mean + e`` to `x`, and select from the whole bucket, together with all owners.

        Returns:
            The codecs of all owners' messages, and the positions of this owner's entries, one
            tensor for each piece that has any.
        """
        down, rank = self._down, self._exchange.rank
        scratch = self._state.scratch(("down", down), down.whole.scratch)
        # On the CPU, because the search compares the thresholds on the host.
        before, after = self._state.open(self._thresholds, torch.device("cpu"))  # type: ignore[arg-type]
        spans = {piece.vector: piece.span for piece in down.pieces[rank]}
        locals_, queries = [], []
        for i, (sizes, guess) in enumerate(zip(down.candidates, before.tolist(), strict=True)):
            # A vector without elements in this shard still needs a query: all ranks take part in
            # the search of every vector.
            span = spans.get(i, slice(0, 0))
            exactly = down.selector.exactly(max(1, sizes[rank]))
            local = exactly.select_sum(mean[span], e[span], x[span], scratch[i])
            locals_.append(local)
            queries.append(Query(order_bits(x[span][local]), sizes, down.kept[i], guess))
        found = find_largest(self._exchange, queries)
        after.copy_(torch.tensor([selection.threshold for selection in found]))
        indices = [
            local[chosen(query.candidates, selection.threshold, selection.counts[rank])]
            for local, query, selection in zip(locals_, queries, found, strict=True)
            if selection.counts[rank]
        ]
        codecs = [
            down.counted(owner, [found[piece.vector].counts[owner] for piece in pieces])
            for owner, pieces in enumerate(down.pieces)
        ]
        return codecs, indices
