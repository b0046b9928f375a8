"""Quantize: round every value to 8 or 4 bits, with one scale per block of 128 values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from torchcomp import host
from torchcomp.component import Choices
from torchcomp.compressors.base import Compressor, Encoded
from torchcomp.draws import drawn
from torchcomp.kernels import quantize
from torchcomp.kernels.segments import TOGETHER, batches
from torchcomp.keys import Key, uniform
from torchcomp.wire import Layout, Parts


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

    def encode(self, x: Tensor, key: Key) -> Encoded:
        noise = None
        if self.rounding == "stochastic":
            # Independent on each rank: the rounding errors average out in the mean.
            noise = drawn(uniform, key, x.numel(), like=x)
        return Encoded(quantize.encode(x, self.format, noise))

    def accumulate(
        self, messages: Sequence[Parts], out: Tensor, key: Key, weight: float = 1.0
    ) -> None:
        if host.can_read(out):
            for parts in messages:
                out.add_(quantize.decode(parts, out.numel(), out.dtype), alpha=weight)
            return
        # Together, because each launch delays the backward pass.
        counts = [out.numel()] * len(messages)
        for run in batches(counts, TOGETHER):
            for values in quantize.decode_all(messages[run], counts[run], out.dtype):
                out.add_(values, alpha=weight)

    def alpha(self, numel: int) -> float:
        # One bound serves both kinds of rounding; see error_bound() for the proof.
        return 1.0 - quantize.error_bound(self.format, numel) if numel else 1.0

    def omega(self, numel: int) -> float | None:
        if self.rounding == "nearest":  # biased: the same value is always rounded the same way
            return None
        return quantize.error_bound(self.format, numel) if numel else 0.0
