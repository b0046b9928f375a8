"""Transfer: from every rank's message to the mean, by one of three routes.

"sum" divides by the number of ranks first, as plain DDP does, and adds the messages on the way.
"gather" hands every rank all messages; each decodes them in rank order, because another order
rounds differently and the replicas would drift apart. "sharded" is in sharded.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from torchcomp.codec import Codec, Encoded, Message, Selections
from torchcomp.exchange import Exchange
from torchcomp.kernels.select import Warm
from torchcomp.keys import Key


class Transfer(Protocol):
    """One bucket's way through the collectives of a step."""

    def encode(self, x: Tensor) -> None:
        """Make this rank's message for `x` (1-D, of the bucket's dtype); may overwrite `x`."""

    def encode_sum(self, g: Tensor, e: Tensor, x: Tensor) -> None:
        """Make this rank's message for ``x = g + e``; writes `x`, may overwrite `g`."""

    def subtract(self, x: Tensor) -> None:
        """Take what the message carries out of `x`, which it was made from."""

    def mean(self, out: Tensor) -> None:
        """Exchange messages and write the mean over the ranks to `out`."""


@dataclass
class SumTransfer:
    """All-reduce of messages with one support. See :class:`Transfer`.

    Attributes:
        codec: how the bucket is encoded.
        exchange: the collectives of the group.
        key: key of the encoding.
    """

    codec: Codec
    exchange: Exchange
    key: Key

    def encode(self, x: Tensor) -> None:
        # As plain DDP does it: times the reciprocal, which rounds unlike a division.
        scaled = x.mul_(1.0 / self.exchange.world_size)
        self._message = spoiled(self.codec.encode(scaled, self.key), scaled, self.codec)

    def encode_sum(self, g: Tensor, e: Tensor, x: Tensor) -> None:
        torch.add(g, e, out=x)
        # Encoding scales what it is given, and `x` is the memory to be.
        self.encode(narrow_into(g, x))

    def subtract(self, x: Tensor) -> None:
        self.codec.subtract(self._message, x, self.key, weight=self.exchange.world_size)

    def mean(self, out: Tensor) -> None:
        values = [encoded.parts[0] for encoded in self._message]
        total = values[0] if len(values) == 1 else torch.cat(values)
        self.exchange.sum(total)
        summed = torch.split(total, [value.numel() for value in values])
        self.codec.decode_into([Encoded((value,)) for value in summed], out, self.key)


@dataclass
class GatherTransfer:
    """All-gather of messages. See :class:`Transfer`.

    Attributes:
        codec: how the bucket is encoded.
        exchange: the collectives of the group.
        key: key of the encoding.
        warm: what earlier selections left, one for each vector.
    """

    codec: Codec
    exchange: Exchange
    key: Key
    warm: Sequence[Warm]

    def encode(self, x: Tensor) -> None:
        self._encode(x, None)

    def encode_sum(self, g: Tensor, e: Tensor, x: Tensor) -> None:
        chosen = self.codec.select_sum(g, e, x, self.warm)
        self._encode(narrowed(x, g), chosen)

    def subtract(self, x: Tensor) -> None:
        self.codec.subtract(self._message, x, self.key)

    def mean(self, out: Tensor) -> None:
        out.zero_()
        frames = list(enumerate(self.exchange.gather(self._frame)))
        add_frames(self.codec, self.exchange, frames, out, self.key)
        out.div_(self.exchange.world_size)

    def _encode(self, x: Tensor, selections: Selections | None) -> None:
        self._message = spoiled(self.codec.encode(x, self.key, selections), x, self.codec)
        # At once, because a message may be a view of what it was made from.
        self._frame = torch.empty(self.codec.framed, dtype=torch.uint8, device=x.device)
        self.codec.pack(self._message, self._frame)


def add_frames(
    codec: Codec, exchange: Exchange, frames: Sequence[tuple[int, Tensor]], out: Tensor, key: Key
) -> None:
    """Check and decode frames of one codec, and add them to `out` in their order.

    Args:
        codec: of all of them.
        exchange: notes what is wrong with them.
        frames: with the rank that each came from.
        out: 1-D, of the bucket's or shard's elements.
        key: of the encodings.
    """
    if codec.nbytes:
        received = [exchange.receive(sender, frame, codec.nbytes) for sender, frame in frames]
        codec.accumulate([codec.unpack(payload) for payload in received], out, key)


def narrowed(x: Tensor, g: Tensor) -> Tensor:
    """`x` in the dtype of `g`: itself, or written to `g` by :func:`narrow_into`."""
    return x if x.dtype == g.dtype else narrow_into(g, x)


def narrow_into(out: Tensor, x: Tensor) -> Tensor:
    """Write `x` to `out`; finite values beyond the range of its dtype become its largest.

    With error feedback the memory keeps the rest. NaN and infinities stay what they are.
    """
    largest = torch.finfo(out.dtype).max
    if largest < torch.finfo(x.dtype).max:
        x = torch.where(x.isinf(), x, x.clamp(-largest, largest))
    return out.copy_(x)


def spoiled(message: Message, x: Tensor, codec: Codec) -> Message:
    """`message`, all NaN if `x` has a NaN or an infinity, so that every rank learns of it.

    Compressors that treat every element, or that select those first, need no help in this.
    """
    if all(v.compressor.elementwise or v.compressor.selects for v in codec.vectors):
        return message
    poison = nan_unless_finite(x)
    return [
        Encoded(tuple(_spoil(part, poison) for part in encoded.parts), encoded.index)
        for encoded in message
    ]


def nan_unless_finite(x: Tensor) -> Tensor:
    """A scalar tensor: 0 if every element of `x` is finite, else NaN. One pass, no host sync."""
    if not x.numel():
        return torch.zeros((), dtype=x.dtype, device=x.device)
    lowest, highest = torch.aminmax(x)
    return lowest * 0 + highest * 0


def _spoil(part: Tensor, poison: Tensor) -> Tensor:
    return part + poison if part.is_floating_point() else part
