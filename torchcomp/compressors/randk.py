"""RandK: keep k entries drawn at random, the same on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcomp.compressors.base import Encoded, Messages, Vectors
from torchcomp.compressors.sparse import Sparsifier
from torchcomp.engine import host
from torchcomp.engine.keys import Key
from torchcomp.kernels.cast import nan_unless_finite
from torchcomp.kernels.segments import joined, part
from torchcomp.routes.wire import Field, Layout
from torchcomp.specs.checks import check_flag


@dataclass(frozen=True)
class RandK(Sparsifier):
    """``randk(0.01)``: random entries, the same on all ranks.

    k of n entries are drawn uniformly, without replacement. Every rank draws the same entries from
    the shared key. No indices are sent, and an all-reduce can add the messages. Contractive with
    alpha = k/n. ``unbiased=True`` multiplies the kept values by n/k: the compressor is then
    unbiased with omega = n/k - 1, and not contractive.

    Attributes:
        unbiased: multiply the kept values by n/k.
    """

    name: ClassVar[str] = "randk"
    example: ClassVar[str] = "randk(0.01)"
    summable: ClassVar[bool] = True

    unbiased: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("unbiased", self.unbiased, owner=self.name)

    def layout(self, numel: int, dtype: torch.dtype) -> Layout:
        return (Field("values", dtype, self.kept(numel)),)

    def encode(self, x: Tensor, vectors: Vectors, key: Key) -> Encoded:
        parts, every = [], []
        for segment, index in zip(vectors.segments, self._supports(vectors, key), strict=True):
            own = part(x, segment)
            values = own.index_select(0, index) * self._scale(segment.n)
            # Add NaN to every value sent if any entry of the vector is not finite, drawn or not:
            # the other ranks see only the message.
            parts.append((values + nan_unless_finite(own),))
            every.append(index + segment.start if segment.start else index)
        return Encoded(parts, joined(every))

    def subtract(
        self, encoded: Encoded, x: Tensor, vectors: Vectors, key: Key, weight: float = 1.0
    ) -> None:
        index: Tensor = encoded.index  # type: ignore[assignment]
        values = joined([values for (values,) in encoded.parts])
        x.index_add_(0, index, values.to(x.dtype), alpha=-weight)

    def accumulate(
        self, messages: Messages, out: Tensor, vectors: Vectors, key: Key, weight: float = 1.0
    ) -> None:
        for i, index in enumerate(self._supports(vectors, key)):
            own = part(out, vectors.segments[i])
            # No index occurs twice, so index_add_ gives the same result in any order of its
            # threads.
            for message in messages:
                own.index_add_(0, index, message[i][0].to(out.dtype), alpha=weight)

    # For simulations, whose main cost is to draw: all workers at once.

    def round_trips(self, rows: Tensor, names: Sequence[str], keys: Sequence[Key]) -> Tensor:
        of = [key.of_tensor(name) for key, name in zip(keys, names, strict=True)]
        index = host.copy_to(torch.from_numpy(self.supports(of, rows.shape[1])), rows.device)
        values = rows.gather(1, index) * self._scale(rows.shape[1])
        # As in encode(): 0, or NaN for a row that is not finite.
        values += (rows * 0.0).sum(1, keepdim=True)
        return torch.zeros_like(rows).scatter_(1, index, values)

    def supports(self, keys: Sequence[Key], numel: int) -> NDArray[np.int64]:
        """Return the entries that each key keeps of `numel`; (keys, k), each row ascending."""
        return np.stack([_draw(key, numel, self.kept(numel)) for key in keys])

    def alpha(self, numel: int) -> float | None:
        if self.unbiased:
            return None
        return self.kept(numel) / numel if numel else 1.0

    def omega(self, numel: int) -> float | None:
        return self._scale(numel) - 1.0 if self.unbiased else None

    def _scale(self, numel: int) -> float:
        return numel / self.kept(numel) if self.unbiased and numel else 1.0

    def _supports(self, vectors: Vectors, key: Key) -> list[Tensor]:
        draws = zip(vectors, vectors.segments, strict=True)
        drawn = (_draw(key.of_tensor(v.name), s.n, s.k) for v, s in draws)
        return [host.copy_to(torch.from_numpy(own), vectors.device) for own in drawn]


# Each bucket needs its support twice in a row: to encode and to decode.
@lru_cache(maxsize=1)
def _draw(key: Key, numel: int, k: int) -> NDArray[np.int64]:
    # Draw on the host: torch's generators draw different numbers on CPU and on CUDA, and all ranks
    # must keep the same entries. Sort the indices for memory locality.
    chosen = key.shared().choice(numel, k, replace=False, shuffle=False)
    chosen.sort()
    return chosen
