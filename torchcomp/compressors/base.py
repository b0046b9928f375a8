"""Compressor: tensor -> message -> tensor, as pure functions with messages of static size."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
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
    """The message of one vector.

    Attributes:
        parts: the fields of the message, in the order of :meth:`Compressor.layout`.
        index: ascending int64 indices of the selected entries, if the compressor selects. From
            `encode` they are within the vector, from `encode_all` within the whole tensor.
    """

    parts: Parts
    # The sender's own copy: subtract() does not have to decode the indices from the message.
    index: Tensor | None = None


@dataclass(frozen=True)
class Compressor(Component):
    """Configuration and code of one compression method.

    A compressor C declares bounds on its error:

    - ``alpha``, if it is contractive: E|C(x) - x|^2 <= (1 - alpha) |x|^2;
    - ``omega``, if it is unbiased: E C(x) = x and E|C(x) - x|^2 <= omega |x|^2.

    Either can be None. The contract tests check both for every registered compressor.

    If x contains a NaN or an infinity, its decoded message is not finite either. Every rank detects
    non-finite gradients in the decoded mean.

    Class attributes:
        summable: messages of different ranks can be added field by field, because every rank
            keeps the same entries. Such a message has one floating-point field.
        elementwise: each element is compressed independently of the others, so the result does
            not depend on how parameters are grouped.
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
        """Whether all gradients of the model are compressed as one vector."""
        return False

    @property
    def stages(self) -> tuple[int, ...]:
        """The steps from which on :meth:`at` returns another compressor, ascending from 0."""
        return (0,)

    def at(self, step: int) -> "Compressor":
        """Return the compressor to use at a step: itself, unless it changes during a run.

        Args:
            step: index of the exchange, counted from 0.
        """
        # A function of the step alone, so that ranks agree without a message. Few stages, because
        # codecs and routes are cached for each compressor and shape.
        return self

    @abstractmethod
    def layout(self, numel: int, dtype: torch.dtype) -> Layout:
        """Return the fields of the message for a vector of `numel` elements of `dtype`."""
        # A function of shape and dtype alone: receivers allocate, and explain() counts, from it.

    def kept(self, numel: int) -> int:
        """Return how many of `numel` entries are kept."""
        return numel

    @abstractmethod
    def encode(self, x: Tensor, key: Key) -> Encoded:
        """Compress `x`, a 1-D contiguous floating-point tensor."""

    def encode_sum(
        self, g: Tensor, e: Tensor, out: Tensor, key: Key, scratch: Scratch, dtype: torch.dtype
    ) -> Encoded:
        """Compute ``out = g + e`` and compress it, in one pass if possible.

        Args:
            g: gradient, 1-D.
            e: residual, 1-D.
            out: receives the sum; 1-D, in the residual's dtype.
            key: as for :meth:`encode`.
            scratch: workspace from the last encoding of the same vector. It affects the speed but
                not the result.
            dtype: the sum is rounded to this dtype before it is encoded.
        """
        # `out` keeps the sum in full: after subtract() the residual includes the rounding error.
        torch.add(g, e, out=out)
        return self.encode(narrow(out, dtype), key)

    def subtract(self, encoded: Encoded, x: Tensor, key: Key, weight: float = 1.0) -> None:
        """Subtract `weight` times the decoded message in place from `x`, the encoded vector."""
        # Decodes the message. Subclasses can be faster, because the sender has `encoded.index`.
        self.accumulate((encoded.parts,), x, key, -weight)

    @abstractmethod
    def accumulate(
        self, messages: Sequence[Parts], out: Tensor, key: Key, weight: float = 1.0
    ) -> None:
        """Decode messages and add `weight` times each to `out`, in place and in order.

        Args:
            messages: the fields of each message, as returned by :meth:`encode`.
            out: 1-D tensor of the original length, of any floating-point dtype.
            key: the key passed to :meth:`encode`; its rank can differ.
            weight: factor on the decoded values.
        """
        # In rank order on every rank: floating-point addition is not associative, and the ranks'
        # means must be equal bit for bit.

    def decode(self, parts: Parts, out: Tensor, key: Key) -> Tensor:
        """Decode a message to a dense vector. Write it to `out` (1-D) and return `out`."""
        self.accumulate((parts,), out.zero_(), key)
        return out

    def round_trips(self, rows: Tensor, keys: Sequence[Key]) -> Tensor:
        """Return what the receivers decode from the message of each vector.

        It equals :meth:`encode` and :meth:`decode` of each row with its key. A simulation needs
        only this result, so a subclass can compute it without building messages.

        Args:
            rows: the vectors; (count, n).
            keys: the key of each vector.

        Returns:
            A new tensor, shaped like `rows`.
        """
        out = torch.empty_like(rows)
        for row, key, decoded in zip(rows, keys, out, strict=True):
            self.decode(self.encode(row, key).parts, decoded, key)
        return out

    # Several vectors of one tensor, by compressors of this class. A compressor whose kernels are
    # small overrides these for accelerators, where each launch delays the backward pass.

    @classmethod
    def encode_all(cls, vectors: "Sequence[Vector]", x: Tensor, key: Key) -> list[Encoded]:
        """Compress each of the vectors of `x`, a 1-D tensor."""
        return [v.compressor.encode(x[v.span], key.of_tensor(v.name)) for v in vectors]

    @classmethod
    def encode_sum_all(
        cls,
        vectors: "Sequence[Vector]",
        g: Tensor,
        e: Tensor,
        out: Tensor,
        key: Key,
        scratch: Sequence[Scratch],
        dtype: torch.dtype,
    ) -> list[Encoded]:
        """Write ``out = g + e``, and compress each of its vectors; see :meth:`encode_sum`."""
        message = []
        for v, s in zip(vectors, scratch, strict=True):
            own, named = v.span, key.of_tensor(v.name)
            message.append(v.compressor.encode_sum(g[own], e[own], out[own], named, s, dtype))
        return message

    @classmethod
    def subtract_all(
        cls,
        vectors: "Sequence[Vector]",
        message: Sequence[Encoded],
        x: Tensor,
        key: Key,
        weight: float,
    ) -> None:
        """Subtract the decoded message of each vector from `x`; see :meth:`subtract`."""
        for encoded, v in zip(message, vectors, strict=True):
            v.compressor.subtract(encoded, x[v.span], key.of_tensor(v.name), weight)

    @classmethod
    def accumulate_all(
        cls, messages: "Sequence[Received]", out: Tensor, key: Key, weight: float
    ) -> None:
        """Decode messages of several vectors, and add them to `out` in order."""
        # Consecutive messages of the same vectors in one call: `accumulate` can add them together.
        for _, same in groupby(messages, key=lambda message: id(message[0])):
            vectors, parts = zip(*same, strict=True)
            for v, each in zip(vectors[0], zip(*parts, strict=True), strict=True):
                v.compressor.accumulate(each, out[v.span], key.of_tensor(v.name), weight)

    @abstractmethod
    def alpha(self, numel: int) -> float | None:
        """Contraction constant in (0, 1] for `numel` elements; None if not contractive."""

    @abstractmethod
    def omega(self, numel: int) -> float | None:
        """Bound >= 0 on the relative variance for `numel` elements; None if not unbiased."""


@dataclass(frozen=True)
class Vector:
    """A part of a tensor that is compressed separately."""

    # The parameter, or the first one of several. Random draws depend on it; see `Key.of_tensor`.
    name: str
    span: slice  # the elements of the vector within the tensor
    compressor: Compressor
    layout: Layout


Received = tuple[Sequence[Vector], Sequence[Parts]]
"""A received message: its vectors, and the fields of each."""
