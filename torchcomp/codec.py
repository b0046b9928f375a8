"""Codec: a compressor applied to one bucket, whole or parameter by parameter.

The message of a bucket is the concatenation of the messages of its vectors. With scope "bucket" or
"model", the whole bucket is one vector. With scope "tensor", each parameter is one vector.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, islice

import torch
from torch import Tensor

from torchcomp import wire
from torchcomp.bucket import Names
from torchcomp.compressors.base import Compressor, Encoded
from torchcomp.kernels.select import Scratch
from torchcomp.keys import Key
from torchcomp.wire import Layout, Parts


@dataclass(frozen=True)
class Vector:
    """A part of a bucket that is compressed separately."""

    # The parameter, or the first one of several. Random draws depend on it; see `Key.of_tensor`.
    name: str
    span: slice  # the elements of the vector within the bucket
    compressor: Compressor
    layout: Layout


Message = list[Encoded]


@dataclass(frozen=True)
class Codec:
    """Encodes and decodes the buckets of one shape, vector by vector in the bucket's order."""

    vectors: tuple[Vector, ...]

    @cached_property
    def layout(self) -> Layout:
        """The fields of the bucket's message."""
        return tuple(field for vector in self.vectors for field in vector.layout)

    @cached_property
    def nbytes(self) -> int:
        """Size of the bucket's message in bytes."""
        return wire.nbytes(self.layout)

    @cached_property
    def framed(self) -> int:
        """Size of the framed message in bytes; 0 if there is nothing to send."""
        # An empty message has no frame: there is nothing to check.
        return wire.framed(self.nbytes) if self.nbytes else 0

    def scratch(self) -> list[Scratch]:
        """Return a workspace for :meth:`encode_sum`, one entry per vector."""
        # One each, because selection starts from the previous threshold of its own vector.
        return [Scratch() for _ in self.vectors]

    def encode(self, x: Tensor, key: Key) -> Message:
        """Compress every vector of `x`, a 1-D tensor in the bucket's order."""
        return [v.compressor.encode(x[v.span], key.of_tensor(v.name)) for v in self.vectors]

    def encode_sum(
        self,
        g: Tensor,
        e: Tensor,
        out: Tensor,
        key: Key,
        scratch: Sequence[Scratch],
        dtype: torch.dtype,
    ) -> Message:
        """Write ``out = g + e`` and return its message, encoded from the sum rounded to `dtype`."""
        # One call for both, because a compressor can select in the same pass that adds.
        message = []
        for v, s in zip(self.vectors, scratch, strict=True):
            own, named = v.span, key.of_tensor(v.name)
            message.append(v.compressor.encode_sum(g[own], e[own], out[own], named, s, dtype))
        return message

    def subtract(self, message: Message, x: Tensor, key: Key, weight: float = 1.0) -> None:
        """Subtract `weight` times the decoded `message` from `x`, the bucket that it encodes."""
        for encoded, v in zip(message, self.vectors, strict=True):
            v.compressor.subtract(encoded, x[v.span], key.of_tensor(v.name), weight)

    def accumulate(
        self, messages: Sequence[Sequence[Parts]], out: Tensor, key: Key, weight: float = 1.0
    ) -> None:
        """Add `weight` times the decoded buckets to `out`, in place, one after another."""
        # In the order of the messages: another order rounds differently, so replicas would drift.
        for v, parts in zip(self.vectors, zip(*messages, strict=True), strict=True):
            v.compressor.accumulate(parts, out[v.span], key.of_tensor(v.name), weight)

    def decode(self, message: Sequence[Parts], out: Tensor, key: Key) -> None:
        """Write the decoded bucket to `out`."""
        for parts, v in zip(message, self.vectors, strict=True):
            v.compressor.decode(parts, out[v.span], key.of_tensor(v.name))

    def pack(self, message: Message, frame: Tensor) -> None:
        """Write the message and its header to `frame`: 1-D uint8, ``framed`` elements, aligned."""
        if not self.nbytes:
            return
        payload = wire.payload(frame, self.nbytes)
        wire.pack([part for encoded in message for part in encoded.parts], self.layout, payload)
        # The checksum covers the padding, and `frame` is not initialised.
        frame[wire.HEADER + self.nbytes :] = 0
        wire.seal(frame, self.nbytes)

    def unpack(self, payload: Tensor) -> list[Parts]:
        """Return the fields of a message by vector. ValueError if its length is wrong."""
        parts = iter(wire.unpack(payload, self.layout))
        return [tuple(islice(parts, len(vector.layout))) for vector in self.vectors]


# Cached: every bucket of every step needs its codec, which has the layout of each vector.
@lru_cache(maxsize=4096)
def codec(
    compressor: Compressor, names: Names, sizes: tuple[int, ...], dtype: torch.dtype
) -> Codec:
    """Return the codec for a bucket of these parameters in this dtype."""
    if compressor.per_tensor:
        ends = zip(names, sizes, accumulate(sizes), strict=True)
        spans = [(name, slice(end - size, end)) for name, size, end in ends]
    else:
        # A list of at most one: a bucket without parameters has no vector.
        spans = [(name, slice(0, sum(sizes))) for name in names[:1]]
    return Codec(
        tuple(
            Vector(name, span, compressor, compressor.layout(span.stop - span.start, dtype))
            for name, span in spans
        )
    )
