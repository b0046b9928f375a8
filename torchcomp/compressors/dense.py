"""Base class of the compressors that send one value for each element."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchcomp.compressors.base import Compressor, Messages, Vectors
from torchcomp.engine.keys import Key
from torchcomp.kernels.segments import part


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
        values = [own for (own,) in messages[0]]
        targets = [out]
        if len(values) > 1 or values[0].numel() != out.numel():
            targets = [out[start : start + n] for start, n, _ in vectors.segments]
        # After an in-place all-reduce of a bucket, the message already is `out`.
        if any(a.data_ptr() != b.data_ptr() for a, b in zip(targets, values, strict=True)):
            torch._foreach_copy_(targets, values)
