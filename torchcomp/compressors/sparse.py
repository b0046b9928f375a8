"""Base classes of the compressors that keep k of n entries."""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from torchcomp.compressors.base import Compressor, Encoded, Vectors
from torchcomp.engine.keys import Key
from torchcomp.specs.checks import check_count, is_whole, shown
from torchcomp.specs.component import Choices
from torchcomp.specs.errors import SpecError


@dataclass(frozen=True)
class Sparsifier(Compressor):
    """Base class of compressors that keep k of n entries.

    Attributes:
        ratio: fraction of the entries to keep, in (0, 1]; ceil(ratio * n) are kept, at least one.
        k: number of entries to keep, instead of `ratio`. A shorter vector is kept whole.
        scope: "bucket" selects within the whole bucket and "tensor" within each parameter
            separately. "model" selects among all gradients of the model: the exchange cannot begin
            before the end of the backward pass.
    """

    ratio: float | None = None
    k: int | None = None
    scope: Annotated[str, Choices(("bucket", "tensor", "model"))] = "bucket"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.ratio is None) == (self.k is None):
            raise SpecError(
                f"{self.name} takes either a ratio, as in {self.name}(0.01), or a count k, as in "
                f"{self.name}(k=5), but got {'neither' if self.k is None else 'both'}"
            )
        if self.k is not None:
            check_count("k", self.k, owner=self.name)
        # topk(1) could mean all entries or one entry, so an integer needs its name.
        elif is_whole(self.ratio):
            raise SpecError(
                f"{self.name}: ratio={self.ratio} is ambiguous. Write a fraction with a decimal "
                f"point, as in {self.name}(0.01), or a count as {self.name}(k={self.ratio})",
                "ratio",
            )
        # np.float64 is a float, and NaN fails the comparison.
        elif not isinstance(self.ratio, float) or not 0 < self.ratio <= 1:
            problem = f"ratio must be a fraction above 0 and at most 1, not {shown(self.ratio)}"
            raise SpecError(f"{self.name}: {problem}", "ratio")

    @property
    def per_tensor(self) -> bool:
        return self.scope == "tensor"

    @property
    def whole_model(self) -> bool:
        return self.scope == "model"

    def kept(self, numel: int) -> int:
        return min(self.k, numel) if self.k is not None else _share(self.ratio, numel)


@lru_cache
def _share(ratio: float | None, numel: int) -> int:
    # Use the decimal that the user wrote, not the binary float nearest to it: with floats,
    # ceil(0.07 * 100) is 8.
    return math.ceil(Fraction(str(ratio)) * numel)


@dataclass(frozen=True)
class Selector(Sparsifier):
    """Base class of compressors that keep the k entries of highest rank.

    NaN and infinities rank first. Selection and encoding are separate methods. A selection from a
    whole bucket can therefore be split among the ranks that own its shards.
    """

    selects: ClassVar[bool] = True

    @abstractmethod
    def select(self, x: Tensor, vectors: Vectors) -> Tensor:
        """Return the indices within `x` to keep, int64, vector by vector, ascending in each."""

    @abstractmethod
    def select_sum(self, g: Tensor, e: Tensor, out: Tensor, vectors: Vectors) -> Tensor:
        """Write ``out = g + e``, and :meth:`select` from it."""

    @abstractmethod
    def encode_selected(self, x: Tensor, index: Tensor, vectors: Vectors, key: Key) -> Encoded:
        """Encode the entries `index` of `x`, rounded to ``vectors.dtype`` first."""

    def counted_form(self, device: torch.device) -> tuple[Any, str | None]:
        """Return the module and format for messages whose entries only a device counts."""
        return None, None

    def exactly(self, count: int) -> "Selector":
        """Return the same compressor with ``k=count``, at least 1."""
        # For the shards of a bucket: how many of its k entries fall into a shard varies.
        return replace(self, ratio=None, k=count)

    def encode(self, x: Tensor, vectors: Vectors, key: Key) -> Encoded:
        return self.encode_selected(x, self.select(x, vectors), vectors, key)

    def encode_sum(self, g: Tensor, e: Tensor, rest: Tensor, vectors: Vectors, key: Key) -> Encoded:
        # Select in the residual's dtype: rounding to the message's dtype first would create ties.
        index = self.select_sum(g, e, rest, vectors)
        encoded = self.encode_selected(rest, index, vectors, key)
        self.subtract(encoded, rest, vectors, key)
        return encoded
