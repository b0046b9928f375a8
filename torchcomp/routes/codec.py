"""Codec: a compressor applied to one tensor, whole, parameter by parameter or shard by shard."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from torchcomp.compressors.base import Compressor, Encoded, Message, Vector, Vectors
from torchcomp.engine.bucket import Names
from torchcomp.engine.keys import Key
from torchcomp.routes import wire
from torchcomp.routes.wire import Frames

_NOTHING = Encoded(())


class Codec:
    """Encodes and decodes tensors of one shape: a message is those of its vectors, joined.

    `counts` has the number of vectors in each frame; by default, one frame has all of them.
    """

    def __init__(
        self,
        vectors: Sequence[Vector],
        device: torch.device,
        dtype: torch.dtype,
        counts: Sequence[int] | None = None,
        checksum: bool = False,
        signatures: Sequence[int] | None = None,
    ) -> None:
        self.vectors = Vectors(vectors, device, dtype)
        counts = [len(vectors)] if counts is None else counts
        self.frames = Frames([v.layout for v in vectors], device, checksum, counts, signatures)
        self.vectors.frames = self.frames

    def encode(self, x: Tensor, key: Key) -> Encoded:
        """Compress every vector of `x`, a 1-D tensor, and write the frames."""
        return self.pack(self.fields(x, key))

    def encode_sum(self, g: Tensor, e: Tensor, rest: Tensor, key: Key) -> Encoded:
        """Encode ``g + e`` in one call, and write to `rest` what the message does not contain."""
        vectors = self.vectors
        if not vectors:
            return _NOTHING
        return self.pack(vectors.compressor.encode_sum(g, e, rest, vectors, key))

    def fields(self, x: Tensor, key: Key) -> Encoded:
        """Compress every vector of `x`, without frames."""
        vectors = self.vectors
        return vectors.compressor.encode(x, vectors, key) if vectors else _NOTHING

    def subtract(self, message: Encoded, x: Tensor, key: Key, weight: float = 1.0) -> None:
        """Subtract `weight` times the decoded message in place from `x`, which it encodes."""
        vectors = self.vectors
        if vectors:
            vectors.compressor.subtract(message, x, vectors, key, weight)

    def mean(self, messages: Sequence[Message], out: Tensor, key: Key, divisor: int) -> None:
        """Write the sum of decoded messages, in their order, divided by `divisor`, to `out`."""
        vectors = self.vectors
        if vectors:
            vectors.compressor.mean(messages, out, vectors, key, divisor)
        else:
            out.zero_()

    def mean_of(self, received: Tensor, out: Tensor, key: Key, divisor: int) -> None:
        """Do as :meth:`mean`, for messages in the frames in which they were received."""
        vectors = self.vectors
        if vectors and getattr(vectors.kernels, "reads_frames", False):
            vectors.kernels.mean_of(received, out, divisor)
        else:
            self.mean(self.frames.unpack(received), out, key, divisor)

    def pack(self, message: Encoded) -> Encoded:
        """Write a message to the frames."""
        self.frames.pack(message.parts)
        return message


# Cached: `explain` and every bucket need it, and a bucket can have hundreds of vectors.
@lru_cache(maxsize=4096)
def vectors_of(
    compressor: Compressor, names: Names, sizes: tuple[int, ...], dtype: torch.dtype
) -> tuple[Vector, ...]:
    """Return the vectors of a bucket of these parameters in this dtype."""
    if compressor.scope == "tensor":
        ends = zip(names, sizes, accumulate(sizes), strict=True)
        spans = [(name, slice(end - size, end)) for name, size, end in ends]
    else:
        # A list of at most one: a bucket without parameters has no vector.
        spans = [(name, slice(0, sum(sizes))) for name in names[:1]]
    return tuple(
        Vector(name, span, compressor, compressor.layout(span.stop - span.start, dtype))
        for name, span in spans
    )


def nbytes_of(vectors: Sequence[Vector]) -> int:
    """Return the size in bytes of the message of some vectors, without frames."""
    return sum(wire.nbytes(vector.layout) for vector in vectors)
