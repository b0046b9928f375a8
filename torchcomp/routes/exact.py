"""Exact selections: the entries of a whole bucket, with any number of them in a shard.

Messages then have other lengths in every step, and a collective needs lengths on the host. So the
host waits for the counts of entries: once for the uplink, and once more if the downlink is selected
as well, since its entries depend on the mean of what arrived. Its messages could be padded to the
most that an owner can send, but that is as much as all owners together send.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from torchcomp import host
from torchcomp.codec import Codec
from torchcomp.compressors.base import Encoded, Vector, Vectors
from torchcomp.exchange import Exchange
from torchcomp.kernels.cast import narrow
from torchcomp.keys import Key
from torchcomp.prepared import Prepared
from torchcomp.profiling import OFF, span
from torchcomp.routes.digits import DigitSearch
from torchcomp.routes.shards import Direction
from torchcomp.routes.threshold import HostSearch

_END = 2**63 - 1
"""Above every index."""


class ExactUplink:
    """Entries that are selected from the whole bucket, for the owners of their shards.

    Args:
        bucket: the bucket.
        up: how entries are encoded.
    """

    def __init__(self, bucket: Prepared, up: Direction) -> None:
        exchange, device, shards = bucket.exchange, bucket.device, up.shards
        self._exchange, self._selector = exchange, up.selector
        self._selects = Vectors(up.whole, device, up.shape.dtype)
        everyone = range(exchange.world_size)
        self._messages = _messages(
            bucket, up, everyone, [exchange.rank] * exchange.world_size, up.kept
        )
        starts = [
            part.start + piece.start
            for part, pieces in zip(shards, up.pieces, strict=True)
            for piece in pieces
        ]
        self._starts = host.copy_to(torch.tensor([*starts, _END]), device)
        self._pieces = [len(pieces) for pieces in up.pieces]
        self._arriving = [self._pieces[exchange.rank]] * exchange.world_size
        self._none = torch.empty(0, dtype=torch.int64, device=device)

    def encode(self, x: Tensor, key: Key) -> None:
        index = self._selector.select(x, self._selects) if self._selects else self._none
        self._count(index)
        self._messages.write(x, index, key, False)

    def encode_sum(self, g: Tensor, e: Tensor, rest: Tensor, key: Key) -> None:
        index = self._none  # of a bucket without elements
        if self._selects:
            index = self._selector.select_sum(g, e, rest, self._selects)
        self._count(index)
        self._messages.write(rest, index, key, True)

    def subtract(self, x: Tensor, key: Key, weight: float) -> None:
        self._messages.subtract(x, key, weight)

    def mean(self, out: Tensor, key: Key) -> None:
        messages = self._messages
        received = self._exchange.all_to_all(messages.outgoing, messages.sizes, messages.arriving)
        messages.mean(received, out, key, self._exchange.world_size)

    def _count(self, index: Tensor) -> None:
        """Exchange how many entries there are in each piece of the shards."""
        # Indices ascend, and so do pieces: the entries of each are one slice.
        mine = torch.diff(torch.searchsorted(index, self._starts, out_int32=True))
        theirs = self._exchange.all_to_all(mine, self._pieces, self._arriving)
        self._messages.begin(mine, theirs)


class ExactDownlink:
    """Entries that all owners together select from the whole bucket.

    Args:
        bucket: the bucket, with the slots "server_error" and "thresholds".
        down: how entries are encoded.
    """

    def __init__(self, bucket: Prepared, down: Direction) -> None:
        self._bucket, self._exchange = bucket, bucket.exchange
        rank, pieces = self._exchange.rank, down.pieces
        self._messages = _messages(
            bucket, down, [rank], range(self._exchange.world_size), down.candidates
        )
        like = torch.empty(0, device=bucket.device)
        self._search: Any
        if self._messages.form is not None:
            self._search = self._messages.form.Search(down, self._exchange, bucket.device)
        elif host.can_read(like):
            self._search = HostSearch(down, self._exchange)
        else:
            self._search = DigitSearch(down, self._exchange, bucket.device)
        before = sum(len(own) for own in pieces[:rank])
        self._own = slice(before, before + len(pieces[rank]))

    def encode(self, mean: Tensor, key: Key) -> None:
        e, x = self._bucket.open("server_error")
        index, counts = self._search(mean, e, x, *self._bucket.open("thresholds"))
        self._messages.begin(counts[self._own], counts)
        self._messages.write(x, index, key, True)

    def mean(self, out: Tensor, key: Key) -> None:
        messages = self._messages
        received = self._exchange.all_gather_v(messages.outgoing, messages.arriving)
        messages.mean(received, out, key, 1)
