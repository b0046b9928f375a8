"""Compressor: tensor -> message -> tensor, pure and static in size."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchcomp.component import Component
from torchcomp.kernels.cast import narrow
from torchcomp.kernels.select import Scratch
from torchcomp.keys import Key
from torchcomp.wire import Layout, Parts


@dataclass(frozen=True)
class Encoded:
    """The fields of one vector's message, and the ascending int64 indices that the sender chose."""

    parts: Parts
    index: Tensor | None = None


@dataclass(frozen=True)
class Compressor(Component):
    """Configuration and code of one compression method.

    A compressor declares how good it is: ``alpha`` if it is contractive,
    E|C(x) - x|^2 <= (1 - alpha) |x|^2, and ``omega`` if it is unbiased, E C(x) = x and
    E|C(x) - x|^2 <= omega |x|^2. Either may be None; the registry's contract tests check them. If x
    holds a NaN or an infinity, so does what its message decodes to: every rank learns of it there.

    Class attributes:
        summable: messages of different ranks may be added field by field, because every rank
            keeps the same entries; such a message has one floating-point field.
        elementwise: each element is treated by itself, so how parameters are grouped is irrelevant.
        selects: it keeps entries by their magnitude; see :class:`.sparse.Selector`.
    """

    kind: ClassVar[str] = "compressor"
    summable: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    selects: ClassVar[bool] = False

    @property
    def per_tensor(self) -> bool:
        """Whether each parameter is compressed separately instead of the bucket as one vector."""
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

    @abstractmethod
    def encode(self, x: Tensor, key: Key) -> Encoded:
        """The message for `x`, a 1-D contiguous floating-point tensor."""

    def encode_sum(
        self, g: Tensor, e: Tensor, out: Tensor, key: Key, scratch: Scratch, dtype: torch.dtype
    ) -> Encoded:
        """``out = g + e``, and its message, in one pass where that is possible.

        Args:
            g: gradient, 1-D.
            e: residual, 1-D.
            out: where the sum is written; 1-D, of the residual's dtype.
            key: as for :meth:`encode`.
            scratch: what the same vector's last encoding left; it never changes the result.
            dtype: what the sum is rounded to before it is encoded.
        """
        torch.add(g, e, out=out)
        return self.encode(narrow(out, dtype), key)

    def subtract(self, encoded: Encoded, x: Tensor, key: Key, weight: float = 1.0) -> None:
        """Take `weight` times the decoded message out of `x`, which it was made from, in place."""
        self.accumulate((encoded.parts,), x, key, -weight)

    @abstractmethod
    def accumulate(
        self, messages: Sequence[Parts], out: Tensor, key: Key, weight: float = 1.0
    ) -> None:
        """Add `weight` times each decoded message to `out`, in place and in their order.

        Args:
            messages: the fields of each, as :meth:`encode` made them.
            out: 1-D tensor of the original length, of any floating-point dtype.
            key: the key that :meth:`encode` was given, but for the rank.
            weight: factor on the decoded values.
        """

    def decode(self, parts: Parts, out: Tensor, key: Key) -> Tensor:
        """Write the dense vector that a message stands for to `out` (1-D); returns `out`."""
        self.accumulate((parts,), out.zero_(), key)
        return out

    @abstractmethod
    def alpha(self, numel: int) -> float | None:
        """Contraction constant in (0, 1] for vectors of `numel` elements; None if it has none."""

    @abstractmethod
    def omega(self, numel: int) -> float | None:
        """Relative variance >= 0 for vectors of `numel` elements; None if not unbiased."""
