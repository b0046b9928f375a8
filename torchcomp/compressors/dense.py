"""Identity and Cast: send one value for each element, unchanged or rounded to 16 bits."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from torchcomp.compressors.base import Compressor, Encoded, Messages, Vectors
from torchcomp.engine.keys import Key
from torchcomp.kernels import quantize
from torchcomp.kernels.cast import narrow
from torchcomp.kernels.segments import part
from torchcomp.routes.wire import Field, Layout
from torchcomp.specs.component import Choices


@dataclass(frozen=True)
class Dense(Compressor):
    """Base class of compressors whose messages are values alone, one for each element."""

    summable: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    def encode(self, x: Tensor, vectors: Vectors, key: Key) -> Encoded:
        # No copy: the message shares the memory of `x`.
        return Encoded([(part(x, segment),) for segment in vectors.segments])

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


@dataclass(frozen=True)
class Identity(Dense):
    """``identity``: send every value unchanged.

    alpha = 1 and omega = 0.
    """

    name: ClassVar[str] = "identity"

    def layout(self, numel: int, dtype: torch.dtype) -> Layout:
        return (Field("values", dtype, numel),)

    def alpha(self, numel: int) -> float:
        return 1.0

    def omega(self, numel: int) -> float:
        return 0.0


@dataclass(frozen=True)
class Cast(Dense):
    """``cast("bf16")``: round every value to 16 bits.

    Values are rounded to nearest. fp16 clamps magnitudes above 65,504 and loses precision below
    6.1e-5. The declared alpha is valid between these two. An all-reduce (``exchange="allreduce"``)
    rounds the partial sum at every hop, and this loss reaches no residual. Error feedback then
    conserves the gradient only up to that rounding. With ``exchange="allgather"`` it conserves the
    gradient exactly, at world_size / 2 times the traffic.

    Attributes:
        dtype: "bf16" (range of float32, 8 bits of precision) or "fp16" (11 bits).
    """

    name: ClassVar[str] = "cast"
    example: ClassVar[str] = 'cast("bf16")'

    dtype: Annotated[str, Choices(quantize.CASTS)]

    def layout(self, numel: int, dtype: torch.dtype) -> Layout:
        return quantize.layout(self.dtype, numel, dtype)

    def encode(self, x: Tensor, vectors: Vectors, key: Key) -> Encoded:
        # Finite values beyond the range are clamped, because an infinity would stop the step.
        return super().encode(narrow(x, quantize.CASTS[self.dtype]), vectors, key)

    def alpha(self, numel: int) -> float:
        return 1.0 - quantize.error_bound(self.dtype, numel)

    def omega(self, numel: int) -> None:
        return None
