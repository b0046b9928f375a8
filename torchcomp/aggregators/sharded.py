"""Sharded exchange: entries go to the rank that owns their part of a bucket, answers come back.

Every rank owns a contiguous part, its shard. A step is straight-line:

1. up:   all-to-all, every rank sends each owner the entries that lie in its shard
2. own:  the owner averages them in rank order and, if it remembers, adds what it owes
3. down: all-gather, the owners' answers go to everybody

What a rank sends and receives does not grow with the number of ranks. Messages of compressors that
treat shards by themselves have fixed sizes. A selection from the whole bucket ("exact") puts any
number of entries into a shard, so counts travel first, and for the answer the owners agree on a
threshold (agreement.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from typing import cast

import torch
from torch import Tensor

from torchcomp.aggregators.agreement import (
    LostTrackError,
    Question,
    agree,
    agreement_load,
    chosen,
    order_bits,
)
from torchcomp.aggregators.transfer import add_frames, narrowed, spoiled
from torchcomp.bucket import Bucket, Shard, shards
from torchcomp.codec import Codec, Selections, Vector, codec
from torchcomp.compressors import Compressor
from torchcomp.exchange import Exchange
from torchcomp.kernels.select import add_and_select
from torchcomp.keys import Key
from torchcomp.state import State
from torchcomp.traffic import Load


@dataclass(frozen=True)
class Piece:
    """The elements of one vector that lie in one shard.

    Attributes:
        vector: the vector's place in the bucket's codec.
        name: of the vector and the place where the piece begins.
        start: first element within the shard.
        stop: one past the last element.
    """

    vector: int
    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Plan:
    """How one bucket's shards are encoded in one direction.

    Attributes:
        role: "up" or "down"; part of the key, so that the two draw different numbers.
        compressor: of this direction.
        exact: whether it selects from whole vectors of the bucket.
        names: parameter names of the bucket, in order.
        sizes: number of elements of each.
        dtype: of the values on the wire.
        world_size: number of ranks.
    """

    role: str
    compressor: Compressor
    exact: bool
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    world_size: int

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The bucket's parts, by owner."""
        return shards(self.names, self.sizes, self.world_size)

    @cached_property
    def whole(self) -> Codec:
        """The codec of the bucket as one."""
        return codec(self.compressor, self.names, self.sizes, self.dtype)

    @cached_property
    def fixed(self) -> list[Codec]:
        """By owner, the codec of a shard that is compressed by itself."""
        return [
            codec(self.compressor, self._names(part), part.sizes, self.dtype)
            for part in self.shards
        ]

    @cached_property
    def pieces(self) -> list[list[Piece]]:
        """By owner, the vectors of the whole bucket, cut to a shard."""
        return [list(self._cut(part)) for part in self.shards]

    @cached_property
    def widths(self) -> list[list[int]]:
        """By vector, the elements of its piece in each shard."""
        table = [[0] * self.world_size for _ in self.whole.vectors]
        for owner, pieces in enumerate(self.pieces):
            for piece in pieces:
                table[piece.vector][owner] = piece.stop - piece.start
        return table

    @cached_property
    def lengths(self) -> list[int]:
        """By vector, its elements."""
        return [sum(widths) for widths in self.widths]

    @cached_property
    def candidates(self) -> list[tuple[int, ...]]:
        """By vector, of how many entries each owner must speak for the k largest to be found."""
        return [
            tuple(min(self.kept(place), width) for width in widths)
            for place, widths in enumerate(self.widths)
        ]

    def counted(self, owner: int, counts: Sequence[int]) -> Codec:
        """The codec of a shard that holds `counts` entries of its pieces."""
        vectors = []
        for piece, count in zip(self.pieces[owner], counts, strict=True):
            if count:
                exactly = self.compressor.exactly(count)
                layout = exactly.layout(piece.stop - piece.start, self.dtype)
                vectors.append(Vector(piece.name, piece.start, piece.stop, exactly, layout))
        return Codec(tuple(vectors), self.dtype)

    def kept(self, vector: int) -> int:
        """Entries that are kept of one vector of the whole bucket."""
        return self.compressor.kept(self.lengths[vector])

    def framed(self, owner: int) -> int:
        """Bytes of a shard's frame; for a selection from the whole, if it is spread evenly."""
        if not self.exact:
            return self.fixed[owner].framed
        even = [
            self.kept(piece.vector) * (piece.stop - piece.start) // self.lengths[piece.vector]
            for piece in self.pieces[owner]
        ]
        return self.counted(owner, even).framed

    @cached_property
    def room(self) -> list[int]:
        """By owner, more bytes than any message has that it sends in a step."""
        return [
            16 * (part.stop - part.start) + 2**18 * (1 + len(self.sizes)) for part in self.shards
        ]

    def _names(self, part: Shard) -> tuple[str, ...]:
        return tuple(f"{self.role} {name} from {part.start}" for name in part.names)

    def _cut(self, part: Shard) -> Iterator[Piece]:
        for place, vector in enumerate(self.whole.vectors):
            start, stop = max(vector.start, part.start), min(vector.stop, part.stop)
            if start < stop:
                name = f"{self.role} {vector.name} from {part.start}"
                yield Piece(place, name, start - part.start, stop - part.start)


@lru_cache(maxsize=1024)
def plan(
    role: str,
    compressor: Compressor,
    selection: str,
    names: tuple[str, ...],
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    world_size: int,
) -> Plan:
    """The :class:`Plan` of one direction; `selection` is "exact" or "shard"."""
    exact = selection == "exact" and compressor.selects
    return Plan(role, compressor, exact, names, sizes, dtype, world_size)


@dataclass
class ShardedTransfer:
    """One bucket's way to the owners and back. See :class:`transfer.Transfer`.

    Attributes:
        up: how entries are encoded for the owners.
        down: how the owners encode their answers.
        exchange: the collectives of the group.
        key: key of the encodings.
        state: the owner's memory, and what earlier selections left.
        dtype: in which the owner adds up.
        remembers: whether the owner keeps what its answer leaves out.
    """

    up: Plan
    down: Plan
    exchange: Exchange
    key: Key
    state: State
    dtype: torch.dtype
    remembers: bool

    def encode(self, x: Tensor) -> None:
        exact = self.up.whole.vectors if self.up.exact else ()
        self._encode(x, [v.compressor.select(x[v.span]) for v in exact])

    def encode_sum(self, g: Tensor, e: Tensor, x: Tensor) -> None:
        codecs = [self.up.whole] if self.up.exact else self.up.fixed
        spans = [slice(None)] if self.up.exact else [part.span for part in self.up.shards]
        selections: Selections = []
        for place, (c, span) in enumerate(zip(codecs, spans, strict=True)):
            warm = self.state.warm(f"up {place}", self.up.names, len(c.vectors))
            selections += c.select_sum(g[span], e[span], x[span], warm)
        self._encode(narrowed(x, g), selections)

    def subtract(self, x: Tensor) -> None:
        for c, part, message in zip(self._codecs, self.up.shards, self._messages, strict=True):
            c.subtract(message, x[part.span], self.key)

    def mean(self, out: Tensor) -> None:
        total = self._collect(out.device)
        self._answer(total.div_(self.exchange.world_size), out)

    def _encode(self, x: Tensor, selections: Selections) -> None:
        if self.up.exact:
            # The compressor of an exact plan selects.
            chosen = cast("list[Tensor]", selections)
            self._codecs, self._counts, selections = _cut(self.up, chosen)
        else:
            self._codecs = self.up.fixed
        left = iter(selections or [None] * sum(len(c.vectors) for c in self._codecs))
        self._sizes = [c.framed for c in self._codecs]
        self._outgoing = torch.empty(sum(self._sizes), dtype=torch.uint8, device=x.device)
        frames = torch.split(self._outgoing, self._sizes)
        self._messages = []
        for c, part, frame in zip(self._codecs, self.up.shards, frames, strict=True):
            message = c.encode(x[part.span], self.key, [next(left) for _ in c.vectors])
            self._messages.append(spoiled(message, x, c))
            c.pack(self._messages[-1], frame)

    def _collect(self, device: torch.device) -> Tensor:
        """The sum of all ranks' entries for the shard that this rank owns."""
        arriving = self._arriving()
        incoming = [c.framed for c in arriving]
        received = self.exchange.scatter(self._outgoing, self._sizes, incoming)
        frames = torch.split(received, incoming)
        part = self.up.shards[self.exchange.rank]
        total = torch.zeros(part.stop - part.start, dtype=self.dtype, device=device)
        senders = zip(arriving, enumerate(frames), strict=True)
        # Neighbours that share a codec (all do, unless entries were counted) are added at once.
        for _, run in groupby(senders, key=lambda sender: id(sender[0])):
            codecs, held = zip(*run, strict=True)
            add_frames(codecs[0], self.exchange, held, total, self.key)
        return total

    def _arriving(self) -> list[Codec]:
        """The codec of each rank's message to this one."""
        rank, world_size = self.exchange.rank, self.exchange.world_size
        if not self.up.exact:
            return [self.up.fixed[rank]] * world_size
        device = self.exchange.device
        parts = [torch.tensor(row, dtype=torch.int64, device=device) for row in self._counts]
        widths = [piece.stop - piece.start for piece in self.up.pieces[rank]]
        heard = self.exchange.scatter_numbers(parts, [len(widths)] * world_size)
        # A message may be as long as its shard, where the sender's own count is not known.
        rows = [
            widths if sender in heard.damaged else row.tolist()
            for sender, row in enumerate(heard.rows)
        ]
        rows[rank] = self._counts[rank]
        return [self.up.counted(rank, row) for row in rows]

    def _answer(self, mean: Tensor, out: Tensor) -> None:
        try:
            codecs, selections, rest = self._choose(mean)
        except LostTrackError as lost:
            if lost.awaited:
                self.exchange.abstain(self.down.room)
            return
        rank = self.exchange.rank
        mine = codecs[rank]
        answer = narrowed(rest, torch.empty_like(rest, dtype=self.down.dtype))
        message = spoiled(mine.encode(answer, self.key, selections), answer, mine)
        frame = torch.empty(mine.framed, dtype=torch.uint8, device=out.device)
        mine.pack(message, frame)
        if self.remembers:
            mine.subtract(message, rest, self.key)
        frames = self._gather(frame, [c.framed for c in codecs])
        out.zero_()
        for owner, part in enumerate(self.down.shards):
            sent = [(owner, frames[owner])]
            add_frames(codecs[owner], self.exchange, sent, out[part.span], self.key)

    def _gather(self, frame: Tensor, sizes: list[int]) -> Sequence[Tensor]:
        """Every owner's frame."""
        # Where lengths were agreed on, ranks must not choose a collective by them: see `abstain`.
        if self.down.exact or len(set(sizes)) > 1:
            return torch.split(self.exchange.gather_varied(frame, sizes), sizes)
        return self.exchange.gather(frame)

    def _choose(self, mean: Tensor) -> tuple[list[Codec], Selections | None, Tensor]:
        """Codecs of all answers, this owner's selections, and what it selected them from."""
        if not self.remembers:
            return self.down.fixed, None, mean
        part = self.down.shards[self.exchange.rank]
        owed, rest = self.state.owner.open(Bucket(part.names, part.sizes, mean), self.dtype)
        if self.down.exact:
            return (*self._agree(mean, owed, rest), rest)
        mine = self.down.fixed[self.exchange.rank]
        warm = self.state.warm("down", self.down.names, len(mine.vectors))
        return self.down.fixed, mine.select_sum(mean, owed, rest, warm), rest

    def _agree(self, mean: Tensor, owed: Tensor, rest: Tensor) -> tuple[list[Codec], Selections]:
        """Select from the whole bucket, whose parts the owners hold."""
        rank = self.exchange.rank
        warm = self.state.warm("down", self.down.names, len(self.down.whole.vectors))
        guesses = self.state.agreed(self.down.names)
        spans = {piece.vector: slice(piece.start, piece.stop) for piece in self.down.pieces[rank]}
        locals_, questions = [], []
        for place, sizes in enumerate(self.down.candidates):
            span = spans.get(place, slice(0, 0))
            local = add_and_select(mean[span], owed[span], rest[span], sizes[rank], warm[place])
            locals_.append(local)
            bits = order_bits(rest[span][local])
            questions.append(Question(bits, sizes, self.down.kept(place), guesses.get(place)))
        answers = agree(self.exchange, questions)
        guesses.update(enumerate(answer.threshold for answer in answers))
        selections: Selections = [
            local[chosen(question.candidates, answer.threshold, answer.counts[rank])]
            for local, question, answer in zip(locals_, questions, answers, strict=True)
            if answer.counts[rank]
        ]
        counts = [
            [answers[piece.vector].counts[owner] for piece in pieces]
            for owner, pieces in enumerate(self.down.pieces)
        ]
        return [self.down.counted(o, row) for o, row in enumerate(counts)], selections


def sharded_load(up: Plan, down: Plan, rank: int) -> Load:
    """What one bucket moves over a rank's link; about, where a selection is exact."""
    load = Load()
    others = [owner for owner in range(up.world_size) if owner != rank]
    load.add(Load(sent=sum(up.framed(o) for o in others), received=len(others) * up.framed(rank)))
    load.add(
        Load(sent=len(others) * down.framed(rank), received=sum(down.framed(o) for o in others))
    )
    if up.exact:
        sent = sum(len(up.pieces[o]) + 1 for o in others)
        load.add(Load(sent=8 * sent, received=8 * len(others) * (len(up.pieces[rank]) + 1)))
    if down.exact:
        vectors = [(sizes, down.kept(place)) for place, sizes in enumerate(down.candidates)]
        load.add(agreement_load(vectors, max(4, down.dtype.itemsize), rank))
    return load


def _cut(up: Plan, selections: list[Tensor]) -> tuple[list[Codec], list[list[int]], Selections]:
    """Divide selections from the whole bucket among the shards."""
    held: dict[tuple[int, int], Tensor] = {}
    for place, (vector, index) in enumerate(zip(up.whole.vectors, selections, strict=True)):
        cuts = torch.tensor([part.start - vector.start for part in up.shards[1:]])
        stops = torch.searchsorted(index, cuts.to(index)).tolist()
        for owner, local in enumerate(torch.tensor_split(index, stops)):
            held[owner, place] = local + (vector.start - up.shards[owner].start)
    counts = [
        [held[owner, p.vector].numel() for p in pieces] for owner, pieces in enumerate(up.pieces)
    ]
    cut: Selections = [
        held[owner, p.vector] - p.start
        for owner, pieces in enumerate(up.pieces)
        for p in pieces
        if held[owner, p.vector].numel()
    ]
    return [up.counted(owner, row) for owner, row in enumerate(counts)], counts, cut
