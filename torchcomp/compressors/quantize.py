"""Quantize: every value in 8 or 4 bits, with a scale for every 128 values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchcomp.checks import check_choice
from torchcomp.compressors.base import Compressor, Encoded
from torchcomp.kernels import quantize
from torchcomp.keys import Key
from torchcomp.wire import Layout, Parts


@dataclass(frozen=True)
class Quantize(Compressor):
    """``quantize("int8")`` or ``quantize("int4")``: evenly spaced levels up to a block's maximum.

    Contractive; with ``rounding="stochastic"`` also unbiased. The constants hold for values whose
    block's maximum lies between 127 * 2^-126 and float32's largest number. Reference: Alistarh et
    al., "QSGD", NeurIPS 2017, there with the Euclidean norm as scale.

    Attributes:
        format: "int8" (levels -127 to 127) or "int4" (-7 to 7).
        rounding: "nearest" or "stochastic".
    """

    name: ClassVar[str] = "quantize"
    example: ClassVar[str] = 'quantize("int8")'

    format: str
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        check_choice("format", self.format, quantize.LEVELS, owner=self.name)
        check_choice("rounding", self.rounding, ("nearest", "stochastic"), owner=self.name)

    def layout(self, numel: int, dtype: torch.dtype) -> Layout:
        return quantize.layout(self.format, numel, dtype)

    def encode(self, x: Tensor, key: Key) -> Encoded:
        noise = key.private() if self.rounding == "stochastic" else None
        return Encoded(quantize.encode(x, self.format, noise))

    def accumulate(
        self, messages: Sequence[Parts], out: Tensor, key: Key, weight: float = 1.0
    ) -> None:
        for parts in messages:
            out.add_(quantize.decode(parts, out.numel(), out.dtype), alpha=weight)

    def alpha(self, numel: int) -> float:
        return 1.0 - quantize.error_bound(self.format, numel) if numel else 1.0

    def omega(self, numel: int) -> float | None:
        if self.rounding == "nearest":
            return None
        return quantize.error_bound(self.format, numel) if numel else 0.0
