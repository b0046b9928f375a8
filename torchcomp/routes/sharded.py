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
from functools import cached_property, lru_cache, partial
from itertools import islice

import torch
from torch import Tensor

from torchcomp import host
from torchcomp.bucket import BucketShape, Shard
from torchcomp.codec import Codec, Message, add_messages, codec
from torchcomp.compressors import Compressor
from torchcomp.compressors.base import Vector
from torchcomp.compressors.sparse import Selector, keys_of, segments_of, selector_of
from torchcomp.exchange import Exchange
from torchcomp.kernels.cast import narrow
from torchcomp.kernels.segments import Segment, joined
from torchcomp.keys import Key
from torchcomp.profiling import label
from torchcomp.routes.threshold import Query, chosen, find_largest, order_bits
from torchcomp.state import Slot, State
from torchcomp.wire import Frames

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

    def together(self, codecs: Sequence[Codec]) -> Codec:
        """Return the codec of the whole bucket with a frame for each owner, from the shards'."""
        vectors = [
            replace(v, span=slice(part.start + v.span.start, part.start + v.span.stop))
            for part, each in zip(self.shards, codecs, strict=True)
            for v in each.vectors
        ]
        return Codec(tuple(vectors), tuple(len(each.vectors) for each in codecs))

    @cached_property
    def fixed_together(self) -> Codec:
        """The codec of the whole bucket with a frame for each owner, for fixed sizes."""
        return self.together(self.fixed)

    def counted(self, owner: int, counts: Sequence[int]) -> Codec:
        """Return the codec of a shard with `counts` entries, one count for each of its pieces."""
        vectors = []
        for piece, count in zip(self.pieces[owner], counts, strict=True):
            if count:  # a compressor keeps at least one entry, so an empty piece has no vector
                exactly = self.selector.exactly(count)
                layout = exactly.layout(piece.stop - piece.start, self.shape.dtype)
                vectors.append(Vector(piece.name, piece.span, exactly, layout))
        return Codec(tuple(vectors))


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
        up = self._up
        if up.exact:
            segments = segments_of(up.whole.vectors)
            self._send_selected(x, up.selector.select(x, segments, ()))
        else:
            self._pack_fixed(up.fixed_together.encode(x, self._key), x.device)

    @label("encode")
    def send_sum(self, g: Tensor, e: Tensor, x: Tensor) -> None:
        up, key = self._up, self._key
        codec = up.whole if up.exact else up.fixed_together
        scratch = self._state.scratch(("up", up), codec.scratch)
        if up.exact:
            index = up.selector.select_sum(g, e, x, segments_of(codec.vectors), scratch)
            self._send_selected(narrow(x, g.dtype), index)
        else:
            self._pack_fixed(codec.encode_sum(g, e, x, key, scratch, g.dtype), x.device)

    def sent(self, out: Tensor, weight: float = 1.0) -> None:
        self._codec.subtract(self._message, out, self._key, -weight)

    def mean(self, out: Tensor) -> None:
        exchange = self._exchange
        total = self._collect(out.device).div_(exchange.world_size)
        codec, frames, frame = self._downlink(total)
        # Messages of different lengths need `all_gather_v`, which copies the frame for each rank.
        if len(set(frames.sizes)) == 1:
            received = exchange.all_gather_rows(frame).view(1, -1)
        else:
            received = exchange.all_gather_v(frame, frames.sizes).view(1, -1)
        exchange.check(frames, received, range(exchange.world_size))
        with label("decode"):
            add_messages([(codec, frames.unpack(received)[0])], out.zero_(), self._key)

    def _pack_fixed(self, message: Message, device: torch.device) -> None:
        up, exchange = self._up, self._exchange
        self._arriving = [up.fixed[exchange.rank]] * exchange.world_size
        outgoing = self._fixed_frames("to owners", up, up.fixed_together, device)
        self._in = self._fixed_frames("up", up, up.fixed[exchange.rank], device)
        self._pack(up.fixed_together, message, outgoing)

    def _fixed_frames(
        self, what: str, way: Direction, codec: Codec, device: torch.device
    ) -> Frames:
        checksum = self._exchange.checksum
        key = ("frames", what, way, device, checksum)
        return self._state.scratch(key, partial(codec.frames, device, checksum))

    def _send_selected(self, x: Tensor, index: Tensor) -> None:
        """Encode entries of the bucket, selected from whole vectors, as one message per shard."""
        up, rank = self._up, self._exchange.rank
        counts, arriving = self._exchange_counts(index)
        rows = iter(counts)
        codecs = [up.counted(o, list(islice(rows, len(p)))) for o, p in enumerate(up.pieces)]
        self._arriving = [up.counted(rank, row) for row in arriving]
        codec, checksum = up.together(codecs), self._exchange.checksum
        self._in = up.together(self._arriving).frames(x.device, checksum)
        message = self._encode_selected(codec, x, index)
        self._pack(codec, message, codec.frames(x.device, checksum))

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
        numbers = torch.cat([mine, received]).tolist()
        theirs = numbers[len(starts) :]
        arriving = [theirs[own * r : own * (r + 1)] for r in range(exchange.world_size)]
        return numbers[: len(starts)], arriving

    def _pack(self, codec: Codec, message: Message, frames: Frames) -> None:
        # Pack now: the message can be a view of `x`, which the caller changes next.
        self._codec, self._message, self._out = codec, message, frames
        frames.pack([encoded.parts for encoded in message])

    def _collect(self, device: torch.device) -> Tensor:
        """Receive all ranks' entries of this rank's shard, and return their sum."""
        exchange, frames, ranks = self._exchange, self._in, self._exchange.world_size
        # Either a frame for each sender, or the same one from all.
        sizes = frames.sizes if len(frames.sizes) == ranks else frames.sizes * ranks
        received = exchange.all_to_all(self._out.outgoing(), self._out.sizes, sizes)
        received = received.view(-1, frames.nbytes) if frames.nbytes else received.view(1, -1)
        exchange.check(frames, received, range(ranks))
        part = self._up.shards[exchange.rank]
        total = torch.zeros(part.stop - part.start, dtype=self._dtype, device=device)
        with label("decode"):
            parts = iter([each for row in frames.unpack(received) for each in row])
            messages = [(c, list(islice(parts, len(c.vectors)))) for c in self._arriving]
            # In rank order on every rank: another order would round differently, and the replicas
            # would drift apart.
            add_messages(messages, total, self._key)
        return total

    @label("encode downlink")
    def _downlink(self, mean: Tensor) -> tuple[Codec, Frames, Tensor]:
        """Return the codec and the frames of all owners' messages, and this owner's frame."""
        down, rank, key = self._down, self._exchange.rank, self._key
        everyone, codec, dtype = down.fixed_together, down.fixed[rank], down.shape.dtype
        x = mean
        if self._server is None:  # no error feedback on the downlink
            message = codec.encode(narrow(mean, dtype), key)
        else:
            e, x = self._state.open(self._server, mean.device)
            if down.exact:
                codecs, index = self._select(mean, e, x)
                everyone, codec = down.together(codecs), codecs[rank]
                message = self._encode_selected(codec, narrow(x, dtype), index)
            else:
                scratch = self._state.scratch(("down", down), codec.scratch)
                message = codec.encode_sum(mean, e, x, key, scratch, dtype)
        if everyone is down.fixed_together:
            outgoing = self._fixed_frames("down", down, codec, mean.device)
            arriving = self._fixed_frames("from owners", down, everyone, mean.device)
        else:
            checksum = self._exchange.checksum
            outgoing = codec.frames(mean.device, checksum)
            arriving = everyone.frames(mean.device, checksum)
        # Pack before the subtraction below: the message can be a view of `x`.
        frame = outgoing.pack([encoded.parts for encoded in message])
        if self._server is not None:
            codec.subtract(message, x, key)
        return everyone, arriving, frame

    def _select(self, mean: Tensor, e: Tensor, x: Tensor) -> tuple[list[Codec], Tensor]:
        """Write ``mean + e`` to `x`, and select from the whole bucket, together with all owners.

        Returns:
            The codecs of all owners' messages, and the indices of this owner's entries in `x`.
        """
        down, rank = self._down, self._exchange.rank
        workspaces = self._state.scratch(("down", down), down.whole.scratch)
        # On the CPU, because the search compares the thresholds on the host.
        before, after = self._state.open(self._thresholds, torch.device("cpu"))  # type: ignore[arg-type]
        # Candidates: no more of a vector than are kept, and than there are in this shard.
        segments = [
            Segment(piece.start, piece.stop - piece.start, down.candidates[piece.vector][rank])
            for piece in down.pieces[rank]
        ]
        scratch = [workspaces[piece.vector] for piece in down.pieces[rank]]
        index = down.selector.select_sum(mean, e, x, segments, scratch)
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
        codecs = [
            down.counted(owner, [found[piece.vector].counts[owner] for piece in pieces])
            for owner, pieces in enumerate(down.pieces)
        ]
        return codecs, joined(indices or [index])

    def _encode_selected(self, codec: Codec, x: Tensor, index: Tensor) -> Message:
        if not codec.vectors:
            return []
        # The next step will need other numbers of draws: draw nothing ahead.
        segments, key = segments_of(codec.vectors), replace(self._key, ahead=None)
        keys = keys_of(codec.vectors, key)
        return selector_of(codec.vectors).encode_selected(x, segments, index, keys)
