"""What all methods share that keep k of n entries."""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from torchcomp.checks import check_choice, check_count, is_whole
from torchcomp.compressors.base import Compressor, Encoded
from torchcomp.errors import SpecError
from torchcomp.kernels.cast import narrow
from torchcomp.kernels.select import Scratch
from torchcomp.keys import Key


@dataclass(frozen=True)
class Sparsifier(Compressor):
    """Keeps k of n entries, k given as a fraction or as a count.

    Attributes:
        ratio: fraction of the entries to keep, in (0, 1]; ceil(ratio * n) are kept, at least one.
        k: number of entries to keep, instead of `ratio`; a shorter vector is kept whole.
        scope: "bucket" selects within the whole bucket, "tensor" within each parameter separately,
            "model" among all gradients at once (so the exchange begins when backward has ended).
    """

    ratio: float | None = None
    k: int | None = None
    scope: str = "bucket"

    def __post_init__(self) -> None:
        if (self.ratio is None) == (self.k is None):
            raise SpecError(
                f"{self.name} takes either a fraction, {self.name}(0.01), or a count, "
                f"{self.name}(k=5), and here are {'neither' if self.k is None else 'both'}"
            )
        if self.k is not None:
            check_count("k", self.k, owner=self.name)
        elif is_whole(self.ratio):
            raise SpecError(
                f"{self.name}: is {self.ratio} a fraction or a count? A fraction is written with a "
                f"point, {self.name}(0.01), and a count with its name, {self.name}(k=5)",
                "ratio",
            )
        elif not isinstance(self.ratio, float) or not 0 < self.ratio <= 1:
            problem = f"ratio must be a fraction above 0 and at most 1, not {self.ratio!r}"
            raise SpecError(f"{self.name}: {problem}", "ratio")
        check_choice("scope", self.scope, ("bucket", "tensor", "model"), owner=self.name)

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
    # The decimal that the user wrote, not its binary neighbour: 0.07 of 100 is 7, not 8.
    return math.ceil(Fraction(str(ratio)) * numel)


@dataclass(frozen=True)
class Selector(Sparsifier):
    """Keeps the k entries that rank highest by themselves, NaN and infinities first of all.

    What is selected is known before it is encoded, so a selection from a whole bucket can be
    divided among the owners of its shards.
    """

    selects: ClassVar[bool] = True

    @abstractmethod
    def select(self, x: Tensor) -> Tensor:
        """Ascending int64 indices of the entries of `x` to keep."""

    @abstractmethod
    def select_sum(self, g: Tensor, e: Tensor, out: Tensor, scratch: Scratch) -> Tensor:
        """``out = g + e``, and the entries of it to keep; see :meth:`Compressor.encode_sum`."""

    @abstractmethod
    def encode_selected(self, x: Tensor, index: Tensor, key: Key) -> Encoded:
        """The message for the entries `index` of `x`."""

    def exactly(self, count: int) -> "Selector":
        """The same compressor, keeping `count` (at least 1) entries."""
        return replace(self, ratio=None, k=count)

    def encode(self, x: Tensor, key: Key) -> Encoded:
        return self.encode_selected(x, self.select(x), key)

    def encode_sum(
        self, g: Tensor, e: Tensor, out: Tensor, key: Key, scratch: Scratch, dtype: torch.dtype
    ) -> Encoded:
        index = self.select_sum(g, e, out, scratch)
        return self.encode_selected(narrow(out, dtype), index, key)
