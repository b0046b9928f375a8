"""Identity: send everything as it is."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchcomp.compressors.base import Compressor
from torchcomp.keys import Key
from torchcomp.wire import Field, Layout, Parts


@dataclass(frozen=True)
class Identity(Compressor):
    """``identity``: the dense vector, alpha = 1 and omega = 0."""

    name: ClassVar[str] = "identity"
    summable: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    def layout(self, numel: int, dtype: torch.dtype) -> Layout:
        return (Field("values", dtype, numel),)

    def compress(self, x: Tensor, key: Key) -> Parts:
        return (x,)

    def accumulate(self, parts: Parts, out: Tensor, key: Key, weight: float = 1.0) -> None:
        out.add_(parts[0], alpha=weight)

    def decompress(self, parts: Parts, numel: int, dtype: torch.dtype, key: Key) -> Tensor:
        return parts[0].to(dtype)

    def alpha(self, numel: int) -> float:
        return 1.0

    def omega(self, numel: int) -> float:
        return 0.0
