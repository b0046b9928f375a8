"""Codec: a compressor applied to one bucket, whole or parameter by parameter.

The bucket's message is the concatenation of the messages of its vectors: one vector for the scope
"bucket", one for each parameter for the scope "tensor".
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from torchcomp import wire
from torchcomp.compressors.base import Compressor
from torchcomp.keys import Key
from torchcomp.wire import Layout, Parts

Message = list[Parts]


@dataclass(frozen=True)
class Codec:
    """Encodes and decodes buckets of one shape.

    Attributes:
        compressor: what is applied to each vector.
        names: parameter names of the bucket, in order.
        sizes: number of elements of each parameter.
        dtype: dtype of the vectors.
    """

    compressor: Compressor
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @cached_property
    def vectors(self) -> tuple[tuple[str, int, int], ...]:
        """Name, first element and end of each vector that is compressed by itself."""
        if not self.compressor.per_tensor:
            return ((self.names[0], 0, sum(self.sizes)),)
        spans = zip(self.names, self.sizes, accumulate(self.sizes), strict=True)
        return tuple((name, stop - size, stop) for name, size, stop in spans)

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """Layout of each vector's message."""
        layout = self.compressor.layout
        return tuple(layout(stop - start, self.dtype) for _, start, stop in self.vectors)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the bucket's message."""
        return sum(wire.nbytes(layout) for layout in self.layouts)

    def encode(self, x: Tensor, key: Key) -> Message:
        """Compress every vector of `x`, a 1-D tensor in the bucket's order."""
        compress = self.compressor.compress
        return [compress(x[a:b], key.of_tensor(name)) for name, a, b in self.vectors]

    def accumulate(self, message: Message, out: Tensor, key: Key, weight: float = 1.0) -> None:
        """Add `weight` times the decoded bucket to `out`, in place."""
        for parts, (name, a, b) in zip(message, self.vectors, strict=True):
            self.compressor.accumulate(parts, out[a:b], key.of_tensor(name), weight)

    def decode_into(self, message: Message, out: Tensor, key: Key) -> None:
        """Write the decoded bucket to `out`."""
        for parts, (name, a, b) in zip(message, self.vectors, strict=True):
            view = out[a:b]
            decoded = self.compressor.decompress(parts, b - a, out.dtype, key.of_tensor(name))
            if decoded.data_ptr() != view.data_ptr():
                view.copy_(decoded)

    def pack(self, message: Message) -> Tensor:
        """The message's bytes; 1-D uint8, ``nbytes`` elements."""
        out = torch.empty(self.nbytes, dtype=torch.uint8, device=message[0][-1].device)
        for parts, layout, (start, stop) in zip(message, self.layouts, self._spans(), strict=True):
            wire.pack(parts, layout, out[start:stop])
        return out

    def unpack(self, raw: Tensor) -> Message:
        """The inverse of :meth:`pack`.

        Raises:
            ValueError: if `raw` has another length.
        """
        if raw.numel() != self.nbytes:
            raise ValueError(f"a message of {raw.numel()} bytes, where {self.nbytes} are expected")
        spans = zip(self.layouts, self._spans(), strict=True)
        return [wire.unpack(raw[start:stop], layout) for layout, (start, stop) in spans]

    def _spans(self) -> Iterator[tuple[int, int]]:
        start = 0
        for layout in self.layouts:
            stop = start + wire.nbytes(layout)
            yield start, stop
            start = stop
