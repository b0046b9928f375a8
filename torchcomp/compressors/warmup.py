"""Warmup: begin dense, and send fewer entries from stage to stage."""

from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import ClassVar

import torch
from torch import Tensor

from torchcomp.compressors.base import Compressor, Encoded, Messages, Vectors
from torchcomp.compressors.dense import Identity
from torchcomp.engine.keys import Key
from torchcomp.routes.wire import Layout
from torchcomp.specs.checks import check_count, check_fraction
from torchcomp.specs.component import check_kind
from torchcomp.specs.errors import SpecError

# The paper's: 75 %, 93.75 %, 98.4 % and 99.6 % of the entries are not sent, then 99.9 %.
_FACTOR = 0.25
_DENSE = Identity()


@dataclass(frozen=True)
class Warmup(Compressor):
    """``warmup(topk(0.01), steps=1000)``: a ratio that falls in the first exchanges of a run.

    The ratio is `start`, then a quarter of it, then a sixteenth, and so on, as long as it is above
    that of the compressor. All these stages have the same length, up to one exchange. From exchange
    number `steps` on, counted from 0, the compressor is used as it is. A stage with ratio 1 sends
    every value unrounded, as plain DDP does, and no indices.

    The stage depends on the number of finished exchanges alone, so a resumed run continues with it.
    Residuals are kept from stage to stage. In :class:`torchcomp.LocalSGD`, an exchange is a
    synchronisation.

    Reference: section 3.3 of Lin, Han, Mao, Wang, Dally, "Deep gradient compression: Reducing the
    communication bandwidth for distributed training", ICLR 2018. The paper begins at 0.25.

    Attributes:
        compressor: topk or randk, with a ratio.
        steps: length of the warm-up in exchanges.
        start: ratio of the first stage, above that of the compressor and at most 1.
    """

    name: ClassVar[str] = "warmup"
    example: ClassVar[str] = "warmup(topk(0.01), steps=1000)"

    compressor: Compressor
    steps: int
    start: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kind(self, "compressor", Compressor)
        check_count("steps", self.steps, owner=self.name)
        check_fraction("start", self.start, owner=self.name)
        if getattr(self.compressor, "ratio", None) is None:
            problem = f"warmup lowers a ratio step by step, and {self.compressor} has none"
            raise SpecError(f"{problem}: use topk or randk with a ratio", "compressor")
        if not self._ratios:
            problem = f"start={self.start:g} must be above the ratio of {self.compressor}"
            raise SpecError(f"warmup: {problem}, where the warm-up ends", "start")

    @property
    def stages(self) -> tuple[int, ...]:
        # Rounded up, as `at` rounds down. With fewer steps than ratios, some ratios are left out.
        ratios = len(self._ratios)
        return tuple(dict.fromkeys(-(-i * self.steps // ratios) for i in range(ratios + 1)))

    def at(self, step: int) -> Compressor:
        if step >= self.steps:
            return self.compressor
        ratio = self._ratios[step * len(self._ratios) // self.steps]
        # TopK would send the position of every entry.
        return _DENSE if ratio == 1 else replace(self.compressor, ratio=ratio)  # type: ignore[call-arg]

    @property
    def _ratios(self) -> list[float]:
        """The ratios of the warm-up, one per stage."""
        final: float = self.compressor.ratio  # type: ignore[attr-defined]
        return list(takewhile(lambda r: r > final, (self.start * _FACTOR**i for i in count())))

    # After the warm-up: an aggregator uses what `at` returns, and these to check its options.

    @property
    def summable(self) -> bool:  # type: ignore[override]
        return self.compressor.summable

    @property
    def selects(self) -> bool:  # type: ignore[override]
        return self.compressor.selects

    @property
    def scope(self) -> str:
        return self.compressor.scope

    def layout(self, numel: int, dtype: torch.dtype) -> Layout:
        return self.compressor.layout(numel, dtype)

    def kept(self, numel: int) -> int:
        return self.compressor.kept(numel)

    def prepare(self, vectors: Vectors) -> object:
        return self.compressor.prepare(vectors)

    def encode(self, x: Tensor, vectors: Vectors, key: Key) -> Encoded:
        return self.compressor.encode(x, vectors, key)

    def accumulate(
        self, messages: Messages, out: Tensor, vectors: Vectors, key: Key, weight: float = 1.0
    ) -> None:
        self.compressor.accumulate(messages, out, vectors, key, weight)

    def alpha(self, numel: int) -> float | None:
        return self.compressor.alpha(numel)

    def omega(self, numel: int) -> float | None:
        return self.compressor.omega(numel)
