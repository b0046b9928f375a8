"""Codec: a compressor applied to one bucket, whole or parameter by parameter.

The bucket's message is the concatenation of the messages of its vectors: one vector for the scopes
"bucket" and "model", one for each parameter for the scope "tensor".
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
    """A part of a bucket that is compressed separately, by the name that its key has."""

    name: str  # of the parameter, or of the first of several
    span: slice  # its elements within the bucket
    compressor: Compressor
    layout: Layout


Message = list[Encoded]


@dataclass(frozen=True)
class Codec:
    """Encodes and decodes buckets of one shape, vector by vector in the bucket's order."""

    vectors: tuple[Vector, ...]

    @cached_property
    def layout(self) -> Layout:
        """Fields of the bucket's message."""
        return tuple(field for vector in self.vectors for field in vector.layout)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the bucket's message."""
        return wire.nbytes(self.layout)

    @cached_property
    def framed(self) -> int:
        """Bytes of the bucket's message in its frame; 0 where there is nothing to send."""
        return wire.framed(self.nbytes) if self.nbytes else 0

    def scratch(self) -> list[Scratch]:
        """Work space for :meth:`encode_sum`, one for each vector."""
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
        """``out = g + e``, and its message, with values that were rounded to `dtype` before."""
        message = []
        for v, s in zip(self.vectors, scratch, strict=True):
            own, named = v.span, key.of_tensor(v.name)
            message.append(v.compressor.encode_sum(g[own], e[own], out[own], named, s, dtype))
        return message

    def subtract(self, message: Message, x: Tensor, key: Key, weight: float = 1.0) -> None:
        """Take `weight` times what `message` carries out of `x`, which it was made from."""
        for encoded, v in zip(message, self.vectors, strict=True):
            v.compressor.subtract(encoded, x[v.span], key.of_tensor(v.name), weight)

    def accumulate(
        self, messages: Sequence[Sequence[Parts]], out: Tensor, key: Key, weight: float = 1.0
    ) -> None:
        """Add `weight` times the decoded buckets to `out`, in place, one after another."""
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
        frame[wire.HEADER + self.nbytes :] = 0
        wire.seal(frame, self.nbytes)

    def unpack(self, payload: Tensor) -> list[Parts]:
        """By vector, the fields in a frame's payload; ValueError if it has another length."""
        parts = iter(wire.unpack(payload, self.layout))
        return [tuple(islice(parts, len(vector.layout))) for vector in self.vectors]


@lru_cache(maxsize=4096)
def codec(
    compressor: Compressor, names: Names, sizes: tuple[int, ...], dtype: torch.dtype
) -> Codec:
    """The codec of a bucket of these parameters, whose vectors have this dtype."""
    if compressor.per_tensor:
        ends = zip(names, sizes, accumulate(sizes), strict=True)
        spans = [(name, slice(end - size, end)) for name, size, end in ends]
    else:
        spans = [(name, slice(0, sum(sizes))) for name in names[:1]]
    return Codec(
        tuple(
            Vector(name, span, compressor, compressor.layout(span.stop - span.start, dtype))
            for name, span in spans
        )
    )
