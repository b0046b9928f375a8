"""Base class of the compressors that keep k of n entries."""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Annotated

from torchcomp.compressors.base import Compressor
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
        name, ratio = self.name, self.ratio
        if (ratio is None) == (self.k is None):
            got = "neither" if self.k is None else "both"
            raise SpecError(
                f"{name} takes a ratio, {name}(0.01), or a count, {name}(k=5), not {got}"
            )
        if self.k is not None:
            check_count("k", self.k, owner=name)
        # topk(1) could mean all entries or one entry, so an integer needs its name.
        elif is_whole(ratio):
            advice = f"Write a fraction, as in {name}(0.01), or a count as {name}(k={ratio})"
            raise SpecError(f"{name}: ratio={ratio} is ambiguous. {advice}", "ratio")
        # np.float64 is a float, and NaN fails the comparison.
        elif not isinstance(ratio, float) or not 0 < ratio <= 1:
            problem = f"ratio must be a fraction above 0 and at most 1, not {shown(ratio)}"
            raise SpecError(f"{name}: {problem}", "ratio")

    def kept(self, numel: int) -> int:
        return min(self.k, numel) if self.k is not None else _share(self.ratio, numel)


@lru_cache
def _share(ratio: float | None, numel: int) -> int:
    # Use the decimal that the user wrote, not the binary float nearest to it: with floats,
    # ceil(0.07 * 100) is 8.
    return math.ceil(Fraction(str(ratio)) * numel)
