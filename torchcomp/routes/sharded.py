"""ShardedRoute: entries go to the rank that owns their part of a bucket, and the mean comes back.

Every rank owns a contiguous part, its shard, and is the parameter server of it. A step is
straight-line:

1. up:   all-to-all, every rank sends each owner the entries that lie in its shard
2. own:  the owner averages them in rank order and, with a server residual, adds that
3. down: all-gather, the owners' downlink messages go to everybody

What a rank sends and receives does not grow with the number of ranks. Messages of compressors that
treat shards separately have fixed sizes. A selection from the whole bucket ("exact") puts any
number of entries into a shard, so counts travel first, and for the downlink the owners search a
threshold together (threshold.py).
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
from torchcomp.routes.base import add_frames
from torchcomp.routes.threshold import Question, chosen, find_largest, order_bits, search_load
from torchcomp.state import Slot, State
from torchcomp.traffic import Load


@dataclass(frozen=True)
class Piece:
    """The elements of one vector that lie in one shard."""

    vector: int  # index of the vector in the bucket's codec
    name: str  # of the vector and where the piece begins; part of the key
    start: int  # first element within the shard
    stop: int  # one past the last element

    @property
    def span(self) -> slice:
        """Its elements within the shard."""
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class Direction:
    """How one bucket's shards are encoded on the way up or down."""

    role: str  # "up" or "down"; part of the key, so that the two draw different numbers
    compressor: Compressor  # of this direction
    exact: bool  # whether it selects from whole vectors of the bucket
    shape: BucketShape  # of the bucket, with the dtype of the values on the wire
    world_size: int  # number of ranks

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The bucket's parts, by owner."""
        return self.shape.shards(self.world_size)

    @cached_property
    def whole(self) -> Codec:
        """The codec of the bucket as one."""
        return codec(self.compressor, self.shape.names, self.shape.sizes, self.shape.dtype)

    @cached_property
    def fixed(self) -> list[Codec]:
        """By owner, the codec of a shard that is compressed separately."""
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
        """By owner, the vectors of the whole bucket, cut to a shard."""
        cut: list[list[Piece]] = []
        for part in self.shards:
            cut.append([])
            for place, vector in enumerate(self.whole.vectors):
                start, stop = max(vector.span.start, part.start), min(vector.span.stop, part.stop)
                if start < stop:
                    name = f"{self.role} {vector.name} from {part.start}"
                    cut[-1].append(Piece(place, name, start - part.start, stop - part.start))
        return cut

    @cached_property
    def widths(self) -> list[list[int]]:
        """By vector, the elements of its piece in each shard."""
        table = [[0] * self.world_size for _ in self.whole.vectors]
        for owner, pieces in enumerate(self.pieces):
            for piece in pieces:
                table[piece.vector][owner] = piece.stop - piece.start
        return table

    @cached_property
    def kept(self) -> list[int]:
        """By vector of the whole bucket, how many entries are kept of it."""
        return [self.compressor.kept(sum(widths)) for widths in self.widths]

    @cached_property
    def candidates(self) -> list[list[int]]:
        """By vector, how many entries each owner must bring for the k largest to be found."""
        return [
            [min(kept, width) for width in widths]
            for kept, widths in zip(self.kept, self.widths, strict=True)
        ]

    def counted(self, owner: int, counts: Sequence[int]) -> Codec:
        """The codec of a shard that holds `counts` entries of its pieces."""
        vectors = []
        for piece, count in zip(self.pieces[owner], counts, strict=True):
            if count:
                exactly = self._selector.exactly(count)
                layout = exactly.layout(piece.stop - piece.start, self.shape.dtype)
                vectors.append(Vector(piece.name, piece.span, exactly, layout))
        return Codec(tuple(vectors))

    def encode_selected(
        self, shard: Codec, x: Tensor, chosen: Sequence[Tensor], key: Key
    ) -> Message:
        """The message of a shard of which these entries were selected, vector by vector."""
        return [
            v.compressor.encode_selected(x[v.span], index, key.of_tensor(v.name))  # type: ignore[attr-defined]
            for v, index in zip(shard.vectors, chosen, strict=True)
        ]

    def framed(self, owner: int) -> int:
        """Bytes of a shard's frame; for a selection from the whole, if it is spread evenly."""
        if not self.exact:
            return self.fixed[owner].framed
        even = [
            self.kept[p.vector] * (p.stop - p.start) // sum(self.widths[p.vector])
            for p in self.pieces[owner]
        ]
        return self.counted(owner, even).framed

    @property
    def _selector(self) -> Selector:
        return self.compressor  # type: ignore[return-value]  # where `exact` holds


@lru_cache(maxsize=1024)
def direction(
    role: str, compressor: Compressor, selection: str, shape: BucketShape, world_size: int
) -> Direction:
    """The :class:`Direction` "up" or "down"; `selection` is "exact" or "shard"."""
    exact = selection == "exact" and compressor.selects
    return Direction(role, compressor, exact, shape, world_size)


class ShardedRoute:
    """One bucket's way to the owners and back. See :class:`.base.Route`.

    Args:
        up: how entries are encoded for the owners.
        down: how the owners encode the mean.
        exchange: the collectives of the group.
        key: key of the encodings.
        state: holds the server residual, and what earlier encodings left.
        dtype: in which the owner adds up.
        server: slot of the server residual, if what the downlink leaves out is kept.
        thresholds: slot of the last step's thresholds, where the downlink is exact.
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

    def send(self, x: Tensor) -> None:
        if self._up.exact:
            self._send_selected(x, [v.compressor.select(x[v.span]) for v in self._up.whole.vectors])  # type: ignore[attr-defined]
            return
        self._codecs = self._up.fixed
        shards = zip(self._codecs, self._up.shards, strict=True)
        self._pack([c.encode(x[part.span], self._key) for c, part in shards], x.device)

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
        alike = len(set(sizes)) == 1
        frames = (
            self._exchange.all_gather(frame) if alike else self._exchange.all_gather_v(frame, sizes)
        )
        out.zero_()
        for owner, (c, part) in enumerate(zip(codecs, self._down.shards, strict=True)):
            add_frames(c, self._exchange, [(owner, frames[owner])], out[part.span], self._key)

    def _send_selected(self, x: Tensor, selections: Sequence[Tensor]) -> None:
        """Divide selections from the whole bucket among the shards."""
        up = self._up
        held: dict[tuple[int, int], Tensor] = {}
        for place, (vector, index) in enumerate(zip(up.whole.vectors, selections, strict=True)):
            first = vector.span.start
            cuts = torch.tensor([part.start - first for part in up.shards[1:]])
            stops = torch.searchsorted(index, cuts.to(index)).tolist()
            for owner, local in enumerate(torch.tensor_split(index, stops)):
                held[owner, place] = local + (first - up.shards[owner].start)
        self._counts = [
            [held[owner, p.vector].numel() for p in pieces]
            for owner, pieces in enumerate(up.pieces)
        ]
        self._codecs = [up.counted(owner, row) for owner, row in enumerate(self._counts)]
        messages = []
        for owner, (c, part) in enumerate(zip(self._codecs, up.shards, strict=True)):
            own = [held[owner, p.vector] - p.start for p in up.pieces[owner]]
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
        """The sum of all ranks' entries for the shard that this rank owns."""
        exchange, up, rank = self._exchange, self._up, self._exchange.rank
        arriving = [up.fixed[rank]] * exchange.world_size
        if up.exact:
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
        # Neighbours that share a codec (all do, unless entries were counted) are added at once.
        for _, run in groupby(senders, key=lambda sender: id(sender[0])):
            codecs, held = zip(*run, strict=True)
            add_frames(codecs[0], exchange, held, total, self._key)
        return total

    def _downlink(self, mean: Tensor) -> tuple[Sequence[Codec], Tensor]:
        """The codecs of all owners' downlink messages, and this owner's framed message."""
        down, rank, key = self._down, self._exchange.rank, self._key
        codecs, dtype = down.fixed, down.shape.dtype
        x = mean
        if self._server is None:
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
        # Before the subtraction, because a message may be a view of what it was made from.
        codecs[rank].pack(message, frame)
        if self._server is not None:
            codecs[rank].subtract(message, x, key)
        return codecs, frame

    def _select(self, mean: Tensor, e: Tensor, x: Tensor) -> tuple[list[Codec], list[Tensor]]:
        """Write ``x = mean + e``, and select from the whole bucket, whose parts the owners hold."""
        down, rank = self._down, self._exchange.rank
        scratch = self._state.scratch(("down", down), down.whole.scratch)
        before, after = self._state.open(self._thresholds, torch.device("cpu"))  # type: ignore[arg-type]
        spans = {piece.vector: piece.span for piece in down.pieces[rank]}
        locals_, questions = [], []
        for place, (sizes, guess) in enumerate(zip(down.candidates, before.tolist(), strict=True)):
            span = spans.get(place, slice(0, 0))
            exactly = down._selector.exactly(max(1, sizes[rank]))
            local = exactly.select_sum(mean[span], e[span], x[span], scratch[place])
            locals_.append(local)
            questions.append(Question(order_bits(x[span][local]), sizes, down.kept[place], guess))
        answers = find_largest(self._exchange, questions)
        after.copy_(torch.tensor([answer.threshold for answer in answers]))
        selections = [
            local[chosen(question.candidates, answer.threshold, answer.counts[rank])]
            for local, question, answer in zip(locals_, questions, answers, strict=True)
            if answer.counts[rank]
        ]
        codecs = [
            down.counted(owner, [answers[piece.vector].counts[owner] for piece in pieces])
            for owner, pieces in enumerate(down.pieces)
        ]
        return codecs, selections


def sharded_load(up: Direction, down: Direction, rank: int) -> Load:
    """What one bucket moves over a rank's link; about, where a selection is exact."""
    others = [owner for owner in range(up.world_size) if owner != rank]
    load = Load(
        sent=sum(up.framed(o) for o in others) + len(others) * down.framed(rank),
        received=len(others) * up.framed(rank) + sum(down.framed(o) for o in others),
    )
    if up.exact:
        load.sent += 4 * sum(len(up.pieces[o]) for o in others)
        load.received += 4 * len(others) * len(up.pieces[rank])
    if down.exact:
        vectors = list(zip(down.candidates, down.kept, strict=True))
        load.add(search_load(vectors, max(4, down.shape.dtype.itemsize), rank))
    return load
