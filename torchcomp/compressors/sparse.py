"""Base classes of the compressors that keep k of n entries."""

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from torchcomp.checks import check_count, is_whole, shown
from torchcomp.component import Choices
from torchcomp.compressors.base import Compressor, Encoded, Vector
from torchcomp.errors import SpecError
from torchcomp.kernels.cast import narrow
from torchcomp.kernels.segments import Segment
from torchcomp.kernels.select import Scratch
from torchcomp.keys import Key


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
    def select(self, x: Tensor, segments: Sequence[Segment], scratch: Sequence[Scratch]) -> Tensor:
        """Select entries of each segment of `x`, 1-D.

        Args:
            x: 1-D.
            segments: parts of `x` in ascending order, and how many entries to keep of each.
            scratch: workspaces from the last selections of the same segments; can be empty.

        Returns:
            The indices within `x` to keep, 1-D int64, ascending.
        """

    @abstractmethod
    def select_sum(
        self,
        g: Tensor,
        e: Tensor,
        out: Tensor,
        segments: Sequence[Segment],
        scratch: Sequence[Scratch],
    ) -> Tensor:
        """Write ``out = g + e`` in the segments, and :meth:`select` from it."""

    @abstractmethod
    def encode_selected(
        self, x: Tensor, segments: Sequence[Segment], index: Tensor, keys: Iterable[Key]
    ) -> list[Encoded]:
        """Encode the entries `index` of `x`, which :meth:`select` returned, as one message each.

        Args:
            x: 1-D.
            segments: the parts of `x`.
            index: indices within `x`, segment by segment.
            keys: the key of each segment.
        """

    def exactly(self, count: int) -> "Selector":
        """Return the same compressor with ``k=count``, at least 1."""
        # For the shards of a bucket: how many of its k entries fall into a shard varies.
        return replace(self, ratio=None, k=count)

    def encode(self, x: Tensor, key: Key) -> Encoded:
        whole = self._whole(x)
        return self.encode_selected(x, whole, self.select(x, whole, ()), (key,))[0]

    def encode_sum(
        self, g: Tensor, e: Tensor, out: Tensor, key: Key, scratch: Scratch, dtype: torch.dtype
    ) -> Encoded:
        whole = self._whole(out)
        # Select in the residual's dtype: rounding to `dtype` first would create ties.
        index = self.select_sum(g, e, out, whole, (scratch,))
        return self.encode_selected(narrow(out, dtype), whole, index, (key,))[0]

    def _whole(self, x: Tensor) -> list[Segment]:
        return [Segment(0, x.numel(), self.kept(x.numel()))]

    @classmethod
    def encode_all(cls, vectors: Sequence[Vector], x: Tensor, key: Key) -> list[Encoded]:
        selector, segments = selector_of(vectors), segments_of(vectors)
        index = selector.select(x, segments, ())
        return selector.encode_selected(x, segments, index, keys_of(vectors, key))

    @classmethod
    def encode_sum_all(
        cls,
        vectors: Sequence[Vector],
        g: Tensor,
        e: Tensor,
        out: Tensor,
        key: Key,
        scratch: Sequence[Scratch],
        dtype: torch.dtype,
    ) -> list[Encoded]:
        selector, segments = selector_of(vectors), segments_of(vectors)
        index = selector.select_sum(g, e, out, segments, scratch)
        keys = keys_of(vectors, key)
        return selector.encode_selected(narrow(out, dtype), segments, index, keys)

    @classmethod
    def subtract_all(
        cls,
        vectors: Sequence[Vector],
        message: Sequence[Encoded],
        x: Tensor,
        key: Key,
        weight: float,
    ) -> None:
        # `encode_all` returns indices within the whole tensor, and `subtract` takes a vector.
        local = []
        for encoded, v in zip(message, vectors, strict=True):
            index = None if encoded.index is None else encoded.index - v.span.start
            local.append(Encoded(encoded.parts, index))
        super().subtract_all(vectors, local, x, key, weight)


def selector_of(vectors: Sequence[Vector]) -> Selector:
    """Return the compressor of vectors, which can differ in the number of entries only."""
    return vectors[0].compressor  # type: ignore[return-value]


def segments_of(vectors: Sequence[Vector]) -> list[Segment]:
    """Return the parts of a tensor that the vectors are, and how many entries each sends."""
    sizes = ((v, v.span.stop - v.span.start) for v in vectors)
    return [Segment(v.span.start, size, v.compressor.kept(size)) for v, size in sizes]


def keys_of(vectors: Sequence[Vector], key: Key) -> Iterator[Key]:
    """Yield the key of each vector."""
    # One by one, because most compressors draw nothing and need no key.
    return (key.of_tensor(v.name) for v in vectors)
