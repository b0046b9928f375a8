"""Codec: a compressor applied to one bucket, whole or parameter by parameter.

The bucket's message is the concatenation of the messages of its vectors: one vector for the scopes
"bucket" and "model", one for each parameter for the scope "tensor".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from torchcomp import wire
from torchcomp.compressors.base import Compressor
from torchcomp.kernels.select import Warm
from torchcomp.keys import Key
from torchcomp.wire import Layout, Parts


@dataclass(frozen=True)
class Vector:
    """A part of a bucket that is compressed by itself.

    Attributes:
        name: of the parameter, or of the first of several; part of the key.
        start: first element within the bucket.
        stop: one past the last element.
        compressor: what it is compressed by.
        layout: of its message.
    """

    name: str
    start: int
    stop: int
    compressor: Compressor
    layout: Layout

    @property
    def span(self) -> slice:
        """Its elements within the bucket."""
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class Encoded:
    """What one vector was compressed to.

    Attributes:
        parts: the fields of its message.
        index: int64 indices of the entries that were kept, where the compressor selects.
    """

    parts: Parts
    index: Tensor | None = None


Message = list[Encoded]
Selections = list[Tensor | None]


@dataclass(frozen=True)
class Codec:
    """Encodes and decodes buckets of one shape.

    Attributes:
        vectors: what is compressed by itself, in the order of the bucket.
        dtype: dtype of the vectors.
    """

    vectors: tuple[Vector, ...]
    dtype: torch.dtype

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the bucket's message."""
        return sum(wire.nbytes(vector.layout) for vector in self.vectors)

    @cached_property
    def framed(self) -> int:
        """Bytes of the bucket's message in its frame; 0 where there is nothing to send."""
        return wire.framed(self.nbytes) if self.nbytes else 0

    def select_sum(self, g: Tensor, e: Tensor, out: Tensor, warm: Sequence[Warm]) -> Selections:
        """``out = g + e``, and each vector's selection from it (see Compressor.select_sum)."""
        return [
            v.compressor.select_sum(g[v.span], e[v.span], out[v.span], w)
            for v, w in zip(self.vectors, warm, strict=True)
        ]

    def encode(self, x: Tensor, key: Key, selections: Selections | None = None) -> Message:
        """Compress every vector of `x`, a 1-D tensor in the bucket's order.

        Args:
            x: of the codec's dtype.
            key: seed, step and rank.
            selections: as :meth:`select_sum` returned them; by default each vector selects now.
        """
        chosen = selections or [None] * len(self.vectors)
        return [
            _encode(v, x[v.span], key.of_tensor(v.name), index)
            for v, index in zip(self.vectors, chosen, strict=True)
        ]

    def subtract(self, message: Message, x: Tensor, key: Key, weight: float = 1.0) -> None:
        """Take `weight` times what `message` carries out of `x`, which it was made from."""
        for encoded, v in zip(message, self.vectors, strict=True):
            v.compressor.subtract(
                encoded.parts, x[v.span], key.of_tensor(v.name), encoded.index, weight
            )

    def accumulate(self, messages: Sequence[Message], out: Tensor, key: Key) -> None:
        """Add the decoded buckets to `out`, in place, one message after another."""
        for v, sent in zip(self.vectors, zip(*messages, strict=True), strict=True):
            parts = [encoded.parts for encoded in sent]
            v.compressor.accumulate_all(parts, out[v.span], key.of_tensor(v.name))

    def decode_into(self, message: Message, out: Tensor, key: Key) -> None:
        """Write the decoded bucket to `out`."""
        for encoded, v in zip(message, self.vectors, strict=True):
            view = out[v.span]
            decoded = v.compressor.decompress(
                encoded.parts, view.numel(), out.dtype, key.of_tensor(v.name)
            )
            if decoded.data_ptr() != view.data_ptr():
                view.copy_(decoded)

    def pack(self, message: Message, frame: Tensor) -> None:
        """Write the message and its header to `frame`: 1-D uint8, ``framed`` elements, aligned."""
        if not self.nbytes:
            return
        payload = wire.payload(frame, self.nbytes)
        for encoded, vector, (start, stop) in zip(message, self.vectors, self._spans, strict=True):
            wire.pack(encoded.parts, vector.layout, payload[start:stop])
        frame[wire.HEADER + self.nbytes :] = 0
        wire.seal(frame, self.nbytes)

    def unpack(self, payload: Tensor) -> Message:
        """The message in a frame's payload.

        Raises:
            ValueError: if `payload` has another length.
        """
        if payload.numel() != self.nbytes:
            raise ValueError(
                f"a message of {payload.numel()} bytes, where {self.nbytes} are expected"
            )
        return [
            Encoded(wire.unpack(payload[start:stop], vector.layout))
            for vector, (start, stop) in zip(self.vectors, self._spans, strict=True)
        ]

    @cached_property
    def _spans(self) -> tuple[tuple[int, int], ...]:
        stops = list(accumulate(wire.nbytes(vector.layout) for vector in self.vectors))
        return tuple(zip([0, *stops], stops, strict=False))


def _encode(vector: Vector, x: Tensor, key: Key, index: Tensor | None) -> Encoded:
    chosen = vector.compressor.select(x) if index is None else index
    return Encoded(vector.compressor.compress_entries(x, chosen, key), chosen)


@lru_cache(maxsize=4096)
def codec(
    compressor: Compressor, names: tuple[str, ...], sizes: tuple[int, ...], dtype: torch.dtype
) -> Codec:
    """The codec of a bucket.

    Args:
        compressor: what is applied to each vector.
        names: parameter names of the bucket, in order.
        sizes: number of elements of each parameter.
        dtype: dtype of the vectors.
    """
    spans = _spans_of_vectors(compressor, names, sizes)
    return Codec(
        tuple(
            Vector(name, start, stop, compressor, compressor.layout(stop - start, dtype))
            for name, start, stop in spans
        ),
        dtype,
    )


def _spans_of_vectors(
    compressor: Compressor, names: tuple[str, ...], sizes: tuple[int, ...]
) -> list[tuple[str, int, int]]:
    if not names:
        return []
    if not compressor.per_tensor:
        return [(names[0], 0, sum(sizes))]
    spans = zip(names, sizes, accumulate(sizes), strict=True)
    return [(name, stop - size, stop) for name, size, stop in spans]
