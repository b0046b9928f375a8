"""TopK: keep the k entries of largest magnitude."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from torchcomp.compressors.base import Encoded, Messages, Vectors
from torchcomp.compressors.sparse import Sparsifier
from torchcomp.engine.keys import Key
from torchcomp.kernels import backend, elias_fano, quantize
from torchcomp.kernels.sparse import Sparse, kernels_for
from torchcomp.routes.wire import Field, Layout
from torchcomp.specs.component import Choices
from torchcomp.specs.errors import SpecError


@dataclass(frozen=True)
class TopK(Sparsifier):
    """``topk(0.01)``: keep the entries of largest magnitude.

    Contractive with alpha = k/n. Among equal magnitudes the lowest index wins: the result is the
    same on every machine. NaN and infinities rank above every number. Indices are sent as an
    Elias-Fano code. Reference: Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS
    2018.

    Attributes:
        values: format of the values sent, by default the gradient's dtype. "int8" and "int4" have
            one scale per 128 values. With a format, the rounding error lowers alpha.
        rounding: of "int8" and "int4"; "stochastic" is unbiased.
    """

    name: ClassVar[str] = "topk"
    example: ClassVar[str] = "topk(0.01)"
    selects: ClassVar[bool] = True

    values: Annotated[str | None, Choices(quantize.FORMATS)] = None
    rounding: Annotated[str, Choices(quantize.ROUNDINGS)] = "nearest"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounding == "stochastic" and self.values not in quantize.LEVELS:
            problem = 'rounding="stochastic" needs the evenly spaced levels of "int8" or "int4"'
            raise SpecError(f"topk: {problem}, not values={self.values!r}", "rounding")

    def layout(self, numel: int, dtype: torch.dtype) -> Layout:
        k = self.kept(numel)
        index = Field("index", torch.uint8, elias_fano.nbytes(numel, k))
        return (*quantize.layout(self.values, k, dtype), index)

    def prepare(self, vectors: Vectors) -> Sparse:
        return kernels_for(vectors, self.values)

    def select(self, x: Tensor, vectors: Vectors) -> Tensor:
        """Return the indices within `x` to keep, int64, vector by vector, ascending in each."""
        return vectors.kernels.select(x)  # type: ignore[no-any-return]

    def select_sum(self, g: Tensor, e: Tensor, out: Tensor, vectors: Vectors) -> Tensor:
        """Write ``out = g + e``, and :meth:`select` from it."""
        return vectors.kernels.add_and_select(g, e, out)  # type: ignore[no-any-return]

    def encode_selected(self, x: Tensor, index: Tensor, vectors: Vectors, key: Key) -> Encoded:
        """Encode the entries `index` of `x`, rounded to ``vectors.dtype`` first."""
        noise = vectors.noise(key) if self.rounding == "stochastic" else None
        return Encoded(vectors.kernels.encode(x, index, noise), index)

    def encode(self, x: Tensor, vectors: Vectors, key: Key) -> Encoded:
        return self.encode_selected(x, self.select(x, vectors), vectors, key)

    def encode_sum(self, g: Tensor, e: Tensor, rest: Tensor, vectors: Vectors, key: Key) -> Encoded:
        noise = vectors.noise(key) if self.rounding == "stochastic" else None
        return Encoded(*vectors.kernels.encode_sum(g, e, rest, noise))

    def subtract(
        self, encoded: Encoded, x: Tensor, vectors: Vectors, key: Key, weight: float = 1.0
    ) -> None:
        vectors.kernels.subtract(encoded.index, encoded.parts, x, weight)

    def accumulate(
        self, messages: Messages, out: Tensor, vectors: Vectors, key: Key, weight: float = 1.0
    ) -> None:
        vectors.kernels.accumulate(messages, out, weight)

    def mean(
        self, messages: Messages, out: Tensor, vectors: Vectors, key: Key, divisor: int
    ) -> None:
        vectors.kernels.mean(messages, out, divisor)

    def exactly(self, count: int) -> "TopK":
        """Return the same compressor with ``k=count``, at least 1, for a shard of a bucket."""
        return replace(self, ratio=None, k=count)

    def counted_form(self, device: torch.device) -> tuple[Any, str | None]:
        """Return the module and format for messages whose entries only a device counts."""
        if self.rounding == "stochastic":  # the number of random draws would have to be known
            return None, None
        return backend.device_form("counted", torch.empty(0, device=device)), self.values

    def alpha(self, numel: int) -> float:
        if not numel:  # nothing is lost of an empty vector
            return 1.0
        # y are the entries that are sent, with |y|^2 >= (k/n) |x|^2. |C(x) - x|^2 is |x|^2 - |y|^2
        # for the others, plus at most delta |y|^2 for the rounding of y.
        k = self.kept(numel)
        return k / numel * (1.0 - quantize.error_bound(self.values, k))

    def omega(self, numel: int) -> None:
        return None
