"""Codec: a compressor applied to one bucket, whole, parameter by parameter or shard by shard.

The message of a bucket is the concatenation of the messages of its vectors. With scope "bucket" or
"model", the whole bucket is one vector. With scope "tensor", each parameter is one vector. For the
owners of shards, a bucket is encoded as several messages, one frame for each owner.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, islice

import torch
from torch import Tensor

from torchcomp import wire
from torchcomp.bucket import Names
from torchcomp.compressors.base import Compressor, Encoded, Message, Vector, Vectors
from torchcomp.kernels import checksum
from torchcomp.keys import Key
from torchcomp.wire import Layout, Parts


class Codec:
    """Encodes and decodes the tensors of one shape, vector by vector in their order.

    Args:
        vectors: the parts of the tensor that are compressed separately.
        counts: number of vectors in each frame. By default, one frame has all of them.
    """

    def __init__(self, vectors: Vectors, counts: Sequence[int] | None = None) -> None:
        self.vectors, self.counts = vectors, counts

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """The fields of each frame's message."""
        vectors = iter(self.vectors)
        counts = (len(self.vectors),) if self.counts is None else self.counts
        return tuple(
            tuple(field for vector in islice(vectors, count) for field in vector.layout)
            for count in counts
        )

    @cached_property
    def lengths(self) -> list[int]:
        """Size of each frame's message in bytes."""
        return [wire.nbytes(layout) for layout in self.layouts]

    @cached_property
    def sizes(self) -> list[int]:
        """Size of each frame in bytes; 0 if there is nothing to send."""
        # An empty message has no frame: there is nothing to check.
        return [wire.framed(length) if length else 0 for length in self.lengths]

    @property
    def nbytes(self) -> int:
        """Size of all messages in bytes."""
        return sum(self.lengths)

    @property
    def framed(self) -> int:
        """Size of all frames in bytes."""
        return sum(self.sizes)

    def encode(self, x: Tensor, key: Key) -> Encoded:
        """Compress every vector of `x`, a 1-D tensor."""
        vectors = self.vectors
        return vectors.compressor.encode(x, vectors, key) if vectors else Encoded(())

    def encode_sum(self, g: Tensor, e: Tensor, rest: Tensor, key: Key) -> Encoded:
        """Compress ``g + e``, and write what the message does not contain to `rest`."""
        vectors = self.vectors
        return vectors.compressor.encode_sum(g, e, rest, vectors, key) if vectors else Encoded(())

    def subtract(self, encoded: Encoded, x: Tensor, key: Key, weight: float = 1.0) -> None:
        """Subtract `weight` times the decoded message from `x`, the tensor that it encodes."""
        if self.vectors:
            self.vectors.compressor.subtract(encoded, x, self.vectors, key, weight)

    def accumulate(
        self, messages: Sequence[Message], out: Tensor, key: Key, weight: float = 1.0
    ) -> None:
        """Add `weight` times each decoded message to `out`, in place, one after another."""
        # In the order of the messages: another order rounds differently, so replicas would drift.
        if self.vectors:
            self.vectors.compressor.accumulate(messages, out, self.vectors, key, weight)

    def mean(self, messages: Sequence[Message], out: Tensor, key: Key, divisor: int) -> None:
        """Write the sum of the decoded messages, in order, divided by `divisor`, to `out`."""
        if self.vectors:
            self.vectors.compressor.mean(messages, out, self.vectors, key, divisor)
        else:
            out.zero_()

    def pack(self, message: Encoded, frames: Tensor) -> None:
        """Write the messages and their headers to `frames`.

        Args:
            message: the encoded vectors.
            frames: 1-D uint8, ``framed`` elements, aligned to 8 bytes.
        """
        parts = iter([part for own in message.parts for part in own])
        lengths = tuple(length for length in self.lengths if length)
        headers = iter(wire.headers(lengths, frames.device) if lengths else ())
        pieces = []
        for layout, length, size in zip(self.layouts, self.lengths, self.sizes, strict=True):
            if size:
                header = next(headers)
                pieces += [
                    header[: wire.HEADER],
                    *wire.raw(list(islice(parts, len(layout))), layout),
                    header[wire.HEADER :][: size - wire.HEADER - length],
                ]
        if pieces:
            # One call for all fields of all frames: on an accelerator, one kernel.
            torch.cat(pieces, out=frames)
            checksum.seal(frames, lengths)

    def unpack(self, *messages: Tensor) -> list[Parts]:
        """Return the fields by vector of each frame's message. ValueError if a length is wrong."""
        unpacked = map(wire.unpack, messages, self.layouts)
        parts = iter([part for message in unpacked for part in message])
        return [tuple(islice(parts, len(vector.layout))) for vector in self.vectors]


# Cached, because it depends on the shape alone.
@lru_cache(maxsize=4096)
def vectors_of(
    compressor: Compressor, names: Names, sizes: tuple[int, ...], dtype: torch.dtype
) -> tuple[Vector, ...]:
    """Return the vectors of a bucket of these parameters in this dtype."""
    if compressor.per_tensor:
        ends = zip(names, sizes, accumulate(sizes), strict=True)
        spans = [(name, slice(end - size, end)) for name, size, end in ends]
    else:
        # A list of at most one: a bucket without parameters has no vector.
        spans = [(name, slice(0, sum(sizes))) for name in names[:1]]
    return tuple(
        Vector(name, span, compressor, compressor.layout(span.stop - span.start, dtype))
        for name, span in spans
    )


def codec(
    compressor: Compressor,
    names: Names,
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Codec:
    """Return a codec for a bucket of these parameters in this dtype, with workspaces of its own."""
    return Codec(Vectors(vectors_of(compressor, names, sizes, dtype), device, dtype))


def nbytes_of(vectors: Iterable[Vector]) -> int:
    """Return the size of the vectors' message in bytes."""
    return sum(wire.nbytes(vector.layout) for vector in vectors)
