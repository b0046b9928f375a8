"""Cast: round every value to a 16-bit float."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from torchcomp.compressors.base import Encoded, Vectors
from torchcomp.compressors.dense import Dense
from torchcomp.engine.keys import Key
from torchcomp.kernels import quantize
from torchcomp.kernels.cast import narrow
from torchcomp.kernels.segments import part
from torchcomp.routes.wire import Layout
from torchcomp.specs.component import Choices


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
        values = narrow(x, quantize.CASTS[self.dtype])
        return Encoded([(part(values, segment),) for segment in vectors.segments])

    def alpha(self, numel: int) -> float:
        return 1.0 - quantize.error_bound(self.dtype, numel)

    def omega(self, numel: int) -> None:
        return None
