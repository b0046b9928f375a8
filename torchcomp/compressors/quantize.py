"""Quantize: round every value to 8 or 4 bits, with one scale per block of 128 values."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from torchcomp.compressors.base import Compressor, Encoded, Messages, Vectors
from torchcomp.engine.keys import Key
from torchcomp.kernels import quantize
from torchcomp.kernels.quantize import Quantizer, quantizer_for
from torchcomp.routes.wire import Layout
from torchcomp.specs.component import Choices


@dataclass(frozen=True)
class Quantize(Compressor):
    """``quantize("int8")``: round every value to 8 or 4 bits.

    A block of 128 values has one scale. The levels are evenly spaced, up to the largest magnitude
    of the block. Contractive; with ``rounding="stochastic"`` also unbiased. alpha and omega are
    valid if the largest magnitude of each block is between 127 * 2^-126 and the largest float32.
    Reference: Alistarh et al., "QSGD", NeurIPS 2017, where the scale is the Euclidean norm.

    Attributes:
        format: "int8" (levels -127 to 127) or "int4" (-7 to 7).
        rounding: "stochastic" is unbiased.
    """

    name: ClassVar[str] = "quantize"
    example: ClassVar[str] = 'quantize("int8")'

    format: Annotated[str, Choices(quantize.LEVELS)]
    rounding: Annotated[str, Choices(quantize.ROUNDINGS)] = "nearest"

    def layout(self, numel: int, dtype: torch.dtype) -> Layout:
        return quantize.layout(self.format, numel, dtype)

    def prepare(self, vectors: Vectors) -> Quantizer:
        return quantizer_for(vectors, self.format)

    def encode(self, x: Tensor, vectors: Vectors, key: Key) -> Encoded:
        noise = vectors.noise(key) if self.rounding == "stochastic" else None
        return Encoded(vectors.kernels.encode(x, noise))

    def encode_sum(self, g: Tensor, e: Tensor, rest: Tensor, vectors: Vectors, key: Key) -> Encoded:
        noise = vectors.noise(key) if self.rounding == "stochastic" else None
        return Encoded(vectors.kernels.encode_sum(g, e, rest, noise))

    def subtract(
        self, encoded: Encoded, x: Tensor, vectors: Vectors, key: Key, weight: float = 1.0
    ) -> None:
        vectors.kernels.subtract(encoded.parts, x, weight)

    def accumulate(
        self, messages: Messages, out: Tensor, vectors: Vectors, key: Key, weight: float = 1.0
    ) -> None:
        vectors.kernels.accumulate(messages, out, weight)

    def alpha(self, numel: int) -> float:
        # One bound serves both kinds of rounding; see error_bound() for the proof.
        return 1.0 - quantize.error_bound(self.format, numel) if numel else 1.0

    def omega(self, numel: int) -> float | None:
        if self.rounding == "nearest":  # biased: the same value is always rounded the same way
            return None
        return quantize.error_bound(self.format, numel) if numel else 0.0
