"""Codec: a compressor applied to one tensor, whole, parameter by parameter or shard by shard.

The message of a bucket is the concatenation of the messages of its vectors. With scope "bucket" or
"model", the whole bucket is one vector. With scope "tensor", each parameter is one vector. For the
owners of shards, a bucket is encoded as several messages, one frame for each owner.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain

import torch
from torch import Tensor

from torchcomp import wire
from torchcomp.bucket import Names
from torchcomp.compressors.base import Compressor, Encoded, Vector, Vectors
from torchcomp.keys import Key
from torchcomp.wire import Frames, Parts


class Codec:
    """Encodes and decodes tensors of one shape. Made once, and used in every step.

    Args:
        vectors: the parts of the tensor that are compressed separately, in their order. Their
            compressors are of one class.
        device: device of the tensors.
        dtype: dtype of the values on the wire.
        counts: number of vectors in each frame. By default, one frame has all of them.
        checksum: whether frames have a checksum of their payload.

    Attributes:
        vectors: the vectors, prepared for the device.
        frames: the frames of a message.
        memory: the frames that :meth:`encode` has written last; 1-D uint8.
    """

    def __init__(
        self,
        vectors: Sequence[Vector],
        device: torch.device,
        dtype: torch.dtype,
        counts: Sequence[int] | None = None,
        checksum: bool = False,
    ) -> None:
        layouts, start = [], 0
        for count in (len(vectors),) if counts is None else counts:
            own = vectors[start : start + count]
            layouts.append(tuple(chain.from_iterable(vector.layout for vector in own)))
            start += count
        self.frames = Frames(layouts, device, checksum)
        self.vectors = Vectors(vectors, device, dtype)
        self._compressor = vectors[0].compressor if vectors else None

    @property
    def memory(self) -> Tensor:
        """The frames that were encoded last; 1-D uint8. The next encoding overwrites them."""
        return self.frames.memory

    def encode(self, x: Tensor, key: Key) -> Encoded:
        """Compress every vector of `x`, a 1-D tensor, and write the frames."""
        if self._compressor is None:
            return _NOTHING
        return self.pack(self._compressor.encode(x, self.vectors, key))

    def encode_sum(self, g: Tensor, e: Tensor, rest: Tensor, key: Key) -> Encoded:
        """Compress ``g + e``, write the frames, and write to `rest` what the message lacks.

        NaN and infinities of the sum stay in `rest`, if the compressor selects.
        """
        if self._compressor is None:
            return _NOTHING
        # One call for all of it: a compressor can do it in one pass.
        return self.pack(self._compressor.encode_sum(g, e, rest, self.vectors, key))

    def fields(self, x: Tensor, key: Key) -> Encoded:
        """Compress every vector of `x`, without frames."""
        if self._compressor is None:
            return _NOTHING
        return self._compressor.encode(x, self.vectors, key)

    def decode(self, parts: Sequence[Parts], out: Tensor, key: Key) -> None:
        """Write the decoded message with these fields, by vector, to `out`."""
        if self._compressor is not None:
            self._compressor.mean([parts], out, self.vectors, key, 1)

    def subtract(self, message: Encoded, x: Tensor, key: Key, weight: float = 1.0) -> None:
        """Subtract `weight` times the decoded message in place from `x`, which it encodes."""
        if self._compressor is not None:
            self._compressor.subtract(message, x, self.vectors, key, weight)

    def mean(self, received: Sequence[Tensor], out: Tensor, key: Key, divisor: int) -> None:
        """Write the sum of decoded messages, in their order, divided by `divisor`, to `out`.

        Args:
            received: the frames of each message, 1-D uint8.
            out: 1-D.
            key: key of the encodings.
            divisor: at least 1.
        """
        if self._compressor is None:
            return
        messages = [self.unpack(memory) for memory in received]
        self._compressor.mean(messages, out, self.vectors, key, divisor)

    def accumulate(self, received: Tensor, out: Tensor, key: Key) -> None:
        """Add one decoded message to `out`."""
        if self._compressor is not None:
            self._compressor.accumulate([self.unpack(received)], out, self.vectors, key)

    def pack(self, message: Encoded) -> Encoded:
        """Write the fields of a message to its frames."""
        self.frames.pack(list(chain.from_iterable(message.parts)))
        return message

    def unpack(self, memory: Tensor) -> list[Parts]:
        """Return the fields of received frames, by vector."""
        fields = iter(self.frames.unpack(memory))
        return [tuple([next(fields) for _ in vector.layout]) for vector in self.vectors]


_NOTHING = Encoded(())


# Cached: `explain` and every bucket need it, and a bucket can have hundreds of vectors.
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


def message_bytes(vectors: Sequence[Vector]) -> int:
    """Return the size in bytes of the message of some vectors, without frames."""
    return sum(wire.nbytes(vector.layout) for vector in vectors)
