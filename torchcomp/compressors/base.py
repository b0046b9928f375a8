"""Compressor: tensor -> message -> tensor, as pure functions with messages of static size."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from torchcomp.engine import host
from torchcomp.engine.keys import Key
from torchcomp.kernels.cast import narrow
from torchcomp.kernels.segments import Segment, joined
from torchcomp.routes.wire import Frames, Layout, Parts
from torchcomp.specs.component import Component

Message = Sequence[Parts]
"""The fields of each vector, in the order of :meth:`Compressor.layout`."""

Messages = Sequence[Message]


@dataclass(frozen=True)
class Encoded:
    """The message of all vectors of a tensor."""

    parts: Message
    # The sender's copy of the entries sent: int64 indices within the whole tensor, vector by vector
    # and ascending in each. None if all are sent.
    index: Tensor | None = None


@dataclass(frozen=True)
class Vector:
    """A part of a tensor that is compressed separately."""

    # The parameter, or the first one of several. Random draws depend on it; see `Key.of_tensor`.
    name: str
    span: slice  # the elements of the vector within the tensor
    compressor: "Compressor"
    layout: Layout


class Vectors(tuple[Vector, ...]):
    """The vectors of a tensor, prepared for a device and for the dtype of the values in messages.

    Their compressors can differ in the number of entries only. One thread at a time can use them.
    """

    def __new__(
        cls, vectors: Sequence[Vector], device: torch.device, dtype: torch.dtype
    ) -> "Vectors":
        return super().__new__(cls, vectors)

    def __init__(self, vectors: Sequence[Vector], device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.compressor: Compressor = self[0].compressor if self else None  # type: ignore[assignment]
        sizes = ((v, v.span.stop - v.span.start) for v in self)
        kept = (Segment(v.span.start, size, v.compressor.kept(size)) for v, size in sizes)
        self.segments = tuple(kept)
        self.frames: Frames | None = None

    @classmethod
    def of(
        cls,
        compressor: "Compressor",
        numel: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        name: str = "",
    ) -> "Vectors":
        """Return the vectors of a tensor that is compressed as one."""
        vector = Vector(name, slice(0, numel), compressor, compressor.layout(numel, dtype))
        return cls((vector,), torch.device(device), dtype)

    @cached_property
    def kernels(self) -> Any:
        """What :meth:`Compressor.prepare` returns, chosen once."""
        return self.compressor.prepare(self)

    def noise(self, key: Key) -> Tensor:
        """Draw a number in [0, 1) for each value sent, for stochastic rounding."""
        # Independent on each rank: the rounding errors average out in the mean.
        draws = zip(self, self.segments, strict=True)
        drawn = (key.of_tensor(v.name).private().random(s.k, np.float32) for v, s in draws)
        return joined([host.copy_to(torch.from_numpy(own), self.device) for own in drawn])


@dataclass(frozen=True)
class Compressor(Component):
    """Configuration and code of one compression method.

    A compressor C declares bounds on its error:

    - ``alpha``, if it is contractive: E|C(x) - x|^2 <= (1 - alpha) |x|^2;
    - ``omega``, if it is unbiased: E C(x) = x and E|C(x) - x|^2 <= omega |x|^2.

    Either can be None. The contract tests check both for every registered compressor. If x contains
    a NaN or an infinity, its decoded message is not finite either.

    Class attributes:
        summable: messages of different ranks can be added field by field, because every rank
            keeps the same entries. Such a message has one floating-point field.
        elementwise: each element is compressed independently of the others.
        selects: it keeps entries by their magnitude, and has the methods of :class:`.TopK`.
    """

    kind: ClassVar[str] = "compressor"
    summable: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    selects: ClassVar[bool] = False

    @property
    def scope(self) -> str:
        """What is one vector: a "bucket", each "tensor", or all gradients of the "model"."""
        return "bucket"

    @property
    def stages(self) -> tuple[int, ...]:
        """The steps from which on :meth:`at` returns another compressor, ascending from 0."""
        return (0,)

    def at(self, step: int) -> "Compressor":
        """Return the compressor to use in the exchange with this index, usually itself."""
        return self

    @abstractmethod
    def layout(self, numel: int, dtype: torch.dtype) -> Layout:
        """Return the fields of the message for a vector of `numel` elements of `dtype`."""

    def kept(self, numel: int) -> int:
        """Return how many of `numel` entries are kept."""
        return numel

    def prepare(self, vectors: Vectors) -> object:
        """Return ``vectors.kernels``: whatever is chosen once for a device, and workspaces."""
        return None

    @abstractmethod
    def encode(self, x: Tensor, vectors: Vectors, key: Key) -> Encoded:
        """Compress the vectors of `x`, 1-D and contiguous. The message can be a view of it.

        ``key.of_tensor(vector.name)`` seeds a vector's random draws.
        """

    def encode_sum(self, g: Tensor, e: Tensor, rest: Tensor, vectors: Vectors, key: Key) -> Encoded:
        """Compress ``g + e``, and write what the message does not contain to `rest`.

        The sum is rounded to ``vectors.dtype`` before it is encoded; `rest` includes that rounding
        error. With a selecting compressor, `rest` also keeps NaN and infinities. It shares no
        memory with `g`, `e` and the message, and has the dtype of `e`.
        """
        torch.add(g, e, out=rest)
        encoded = self.encode(narrow(rest, vectors.dtype), vectors, key)
        start, stop = rest.data_ptr(), rest.data_ptr() + rest.nbytes
        # Without memory, on a simulated device, the address is 0.
        if start and any(start <= part.data_ptr() < stop for own in encoded.parts for part in own):
            # A view of `rest`, which changes below.
            copies = [tuple(part.clone() for part in own) for own in encoded.parts]
            encoded = Encoded(copies, encoded.index)
        self.subtract(encoded, rest, vectors, key)
        return encoded

    def subtract(
        self, encoded: Encoded, x: Tensor, vectors: Vectors, key: Key, weight: float = 1.0
    ) -> None:
        """Subtract `weight` times the decoded message in place from `x`, the encoded tensor."""
        self.accumulate((encoded.parts,), x, vectors, key, -weight)

    @abstractmethod
    def accumulate(
        self, messages: Messages, out: Tensor, vectors: Vectors, key: Key, weight: float = 1.0
    ) -> None:
        """Decode messages and add `weight` times each to `out`, 1-D, in place and in order.

        `vectors` can overlap, if they are those of several messages. `key` is that of
        :meth:`encode`, but for the rank.
        """

    def mean(
        self, messages: Messages, out: Tensor, vectors: Vectors, key: Key, divisor: int
    ) -> None:
        """Write the sum of the decoded messages, in order, divided by `divisor`, to `out`."""
        # Divide after the sum, so that all routes give the same bits.
        self.accumulate(messages, out.zero_(), vectors, key)
        if divisor != 1:
            out.div_(divisor)

    def round_trips(self, rows: Tensor, names: Sequence[str], keys: Sequence[Key]) -> Tensor:
        """Return what receivers decode from the message of each row of `rows`, for simulations.

        It equals :meth:`encode` and :meth:`mean` of each row, with its name and key.
        """
        out = torch.empty_like(rows)
        for row, name, key, decoded in zip(rows, names, keys, out, strict=True):
            one = Vectors.of(self, row.numel(), row.dtype, row.device, name)
            self.mean((self.encode(row, one, key).parts,), decoded, one, key, 1)
        return out

    @abstractmethod
    def alpha(self, numel: int) -> float | None:
        """Contraction constant in (0, 1] for `numel` elements; None if not contractive."""

    @abstractmethod
    def omega(self, numel: int) -> float | None:
        """Bound >= 0 on the relative variance for `numel` elements; None if not unbiased."""
