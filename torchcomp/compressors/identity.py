"""Identity: send the vector unchanged."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchcomp.compressors.base import Encoded, Vectors
from torchcomp.compressors.dense import Dense
from torchcomp.engine.keys import Key
from torchcomp.kernels.segments import part
from torchcomp.routes.wire import Field, Layout


@dataclass(frozen=True)
class Identity(Dense):
    """``identity``: send every value unchanged.

    alpha = 1 and omega = 0.
    """

    name: ClassVar[str] = "identity"

    def layout(self, numel: int, dtype: torch.dtype) -> Layout:
        return (Field("values", dtype, numel),)

    def encode(self, x: Tensor, vectors: Vectors, key: Key) -> Encoded:
        # No copy: the message shares the memory of `x`.
        return Encoded([(part(x, segment),) for segment in vectors.segments])

    def alpha(self, numel: int) -> float:
        return 1.0

    def omega(self, numel: int) -> float:
        return 0.0
