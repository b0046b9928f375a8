"""Base class of the compressors that send one value for each element."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from torchcomp.compressors.base import Compressor, Messages, Vectors
from torchcomp.kernels.segments import part
from torchcomp.keys import Key


@dataclass(frozen=True)
class Dense(Compressor):
    """Base class of compressors whose messages are values alone, one for each element."""

    summable: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    def accumulate(
        self, messages: Messages, out: Tensor, vectors: Vectors, key: Key, weight: float = 1.0
    ) -> None:
        for message in messages:
            for segment, (values,) in zip(vectors.segments, message, strict=True):
                part(out, segment).add_(values, alpha=weight)

    def mean(
        self, messages: Messages, out: Tensor, vectors: Vectors, key: Key, divisor: int
    ) -> None:
        if len(messages) != 1 or divisor != 1:
            super().mean(messages, out, vectors, key, divisor)
            return
        for segment, (values,) in zip(vectors.segments, messages[0], strict=True):
            own = part(out, segment)
            # After an in-place all-reduce of a bucket, the message already is `out`.
            if own.data_ptr() != values.data_ptr():
                own.copy_(values)
