"""Codec: a compressor applied to one bucket, whole, parameter by parameter or shard by shard.

The message of a bucket is the concatenation of the messages of its vectors. With scope "bucket" or
"model", the whole bucket is one vector. With scope "tensor", each parameter is one vector. For the
owners of shards, a bucket is encoded as several messages, one frame for each owner.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, islice

import torch
from torch import Tensor

from torchcomp import wire
from torchcomp.bucket import Names
from torchcomp.compressors.base import Compressor, Encoded, Vector
from torchcomp.kernels.select import Scratch
from torchcomp.keys import Key
from torchcomp.wire import Frames, Parts

Message = list[Encoded]


@dataclass(frozen=True)
class Codec:
    """Encodes and decodes the tensors of one shape, vector by vector in their order.

    Attributes:
        vectors: the parts of the tensor that are compressed separately.
        counts: number of vectors in each frame. By default, one frame has all of them.
    """

    vectors: tuple[Vector, ...]
    counts: tuple[int, ...] | None = None

    def frames(self, device: torch.device, checksum: bool = False) -> Frames:
        """Return the frames of this codec's messages; see :class:`torchcomp.wire.Frames`."""
        counts = (len(self.vectors),) if self.counts is None else self.counts
        return Frames([vector.layout for vector in self.vectors], device, checksum, counts)

    @cached_property
    def lengths(self) -> list[int]:
        """Size of each frame's message in bytes."""
        counts = (len(self.vectors),) if self.counts is None else self.counts
        vectors = iter(self.vectors)
        return [sum(wire.nbytes(v.layout) for v in islice(vectors, count)) for count in counts]

    @property
    def nbytes(self) -> int:
        """Size of all messages in bytes."""
        return sum(self.lengths)

    @property
    def framed(self) -> int:
        """Size of all frames in bytes."""
        # An empty message has no frame: there is nothing to check.
        return sum(wire.framed(length) for length in self.lengths if length)

    @cached_property
    def _kind(self) -> type[Compressor]:
        return type(self.vectors[0].compressor) if self.vectors else Compressor

    def scratch(self) -> list[Scratch]:
        """Return a workspace for :meth:`encode_sum`, one entry per vector."""
        # One each, because selection starts from the previous threshold of its own vector.
        return [Scratch() for _ in self.vectors]

    def encode(self, x: Tensor, key: Key) -> Message:
        """Compress every vector of `x`, a 1-D tensor."""
        return self._kind.encode_all(self.vectors, x, key)

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
        return self._kind.encode_sum_all(self.vectors, g, e, out, key, scratch, dtype)

    def subtract(self, message: Message, x: Tensor, key: Key, weight: float = 1.0) -> None:
        """Subtract `weight` times the decoded `message` from `x`, the tensor that it encodes."""
        self._kind.subtract_all(self.vectors, message, x, key, weight)

    def decode(self, message: Sequence[Parts], out: Tensor, key: Key) -> None:
        """Write the decoded tensor to `out`."""
        for parts, v in zip(message, self.vectors, strict=True):
            v.compressor.decode(parts, out[v.span], key.of_tensor(v.name))


def add_messages(
    messages: Sequence[tuple[Codec, Sequence[Parts]]], out: Tensor, key: Key, weight: float = 1.0
) -> None:
    """Add `weight` times each decoded message to `out`, in place, one after another.

    Args:
        messages: for each message its codec, and the fields of each of its vectors. The codecs have
            compressors of one class.
        out: 1-D.
        key: key of the encodings.
        weight: factor on the decoded values.
    """
    # In the order of the messages: another order rounds differently, so replicas would drift.
    received = [(codec.vectors, parts) for codec, parts in messages if codec.vectors]
    for codec, _ in messages:
        if codec.vectors:
            codec._kind.accumulate_all(received, out, key, weight)
            break


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
