"""Compressor: tensor -> message -> tensor, pure and static in size."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchcomp.component import Component
from torchcomp.kernels.select import Warm
from torchcomp.keys import Key
from torchcomp.wire import Layout, Parts


@dataclass(frozen=True)
class Compressor(Component):
    """Configuration and code of one compression method.

    A compressor declares how good it is: ``alpha`` if it is contractive,
    E|C(x) - x|^2 <= (1 - alpha) |x|^2, and ``omega`` if it is unbiased, E C(x) = x and
    E|C(x) - x|^2 <= omega |x|^2. Either may be None; the registry's contract tests check them.

    Class attributes:
        summable: messages of different ranks may be added field by field, because every rank
            keeps the same entries; such a message has one floating-point field.
        elementwise: each element is treated by itself, so how parameters are grouped is irrelevant.
        selects: it keeps entries by their magnitude, NaN and infinities first.
    """

    kind: ClassVar[str] = "compressor"
    summable: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    selects: ClassVar[bool] = False

    @property
    def per_tensor(self) -> bool:
        """Whether each parameter is compressed by itself instead of the bucket as one vector."""
        return False

    @property
    def whole_model(self) -> bool:
        """Whether it works on all gradients of the model as one vector."""
        return False

    @abstractmethod
    def layout(self, numel: int, dtype: torch.dtype) -> Layout:
        """Fields of the message for a vector of `numel` elements of `dtype`."""

    def kept(self, numel: int) -> int:
        """Number of entries that are kept of `numel`."""
        return numel

    def exactly(self, count: int) -> "Compressor":
        """The same compressor, keeping `count` (at least 1) entries, where it selects."""
        return self

    def select(self, x: Tensor) -> Tensor | None:
        """Ascending int64 indices of the entries of `x` to keep; None if it does not select."""
        return None

    def select_sum(self, g: Tensor, e: Tensor, out: Tensor, warm: Warm) -> Tensor | None:
        """``out = g + e``, and the entries of it to keep, in one pass where that is possible.

        Args:
            g: gradient, 1-D.
            e: error memory, 1-D.
            out: where the sum is written; 1-D, of the memory's dtype.
            warm: what the same vector's last selection left; it never changes the result.

        Returns:
            As :meth:`select`.
        """
        torch.add(g, e, out=out)
        return None

    @abstractmethod
    def compress(self, x: Tensor, key: Key) -> Parts:
        """The fields of the message for `x`, a 1-D contiguous floating-point tensor."""

    def compress_entries(self, x: Tensor, index: Tensor | None, key: Key) -> Parts:
        """The same, if :meth:`select` has chosen `index` already."""
        return self.compress(x, key)

    def subtract(
        self, parts: Parts, x: Tensor, key: Key, index: Tensor | None, weight: float = 1.0
    ) -> None:
        """Take `weight` times the decoded message out of `x`, in place.

        Args:
            parts: fields as :meth:`compress` made them.
            x: 1-D tensor of the original length, of any floating-point dtype.
            key: the key that :meth:`compress` was given.
            index: the selection that `parts` was made from, if any.
            weight: factor on the decoded values.
        """
        self.accumulate(parts, x, key, -weight)

    @abstractmethod
    def accumulate(self, parts: Parts, out: Tensor, key: Key, weight: float = 1.0) -> None:
        """Add `weight` times the decoded message to `out`, in place.

        Args:
            parts: fields as :meth:`compress` made them.
            out: 1-D tensor of the original length, of any floating-point dtype.
            key: the key that :meth:`compress` was given.
            weight: factor on the decoded values.
        """

    def accumulate_all(self, messages: Sequence[Parts], out: Tensor, key: Key) -> None:
        """Add several ranks' decoded messages to `out`, in place, as one after another would be."""
        for parts in messages:
            self.accumulate(parts, out, key)

    def decompress(self, parts: Parts, numel: int, dtype: torch.dtype, key: Key) -> Tensor:
        """The dense vector that a message stands for; 1-D, `numel` elements of `dtype`."""
        out = torch.zeros(numel, dtype=dtype, device=parts[-1].device)
        self.accumulate(parts, out, key)
        return out

    @abstractmethod
    def alpha(self, numel: int) -> float | None:
        """Contraction constant in (0, 1] for vectors of `numel` elements; None if it has none."""

    @abstractmethod
    def omega(self, numel: int) -> float | None:
        """Relative variance >= 0 for vectors of `numel` elements; None if not unbiased."""
