"""RandK: keep k entries drawn at random, the same on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcomp import host
from torchcomp.checks import check_flag
from torchcomp.compressors.base import Encoded
from torchcomp.compressors.sparse import Sparsifier
from torchcomp.draws import drawn
from torchcomp.kernels.cast import nan_unless_finite
from torchcomp.keys import Key
from torchcomp.wire import Field, Layout, Parts


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

    def encode(self, x: Tensor, key: Key) -> Encoded:
        index = self._support(x, key)
        values = x.index_select(0, index) * self._scale(x.numel())
        # Add NaN to every value sent if any entry of `x` is not finite, drawn or not: the other
        # ranks see only the message.
        return Encoded((values + nan_unless_finite(x),), index)

    def round_trips(self, rows: Tensor, keys: Sequence[Key]) -> Tensor:
        index = host.copy_to(torch.from_numpy(self.supports(keys, rows.shape[1])), rows.device)
        values = rows.gather(1, index) * self._scale(rows.shape[1])
        # As in encode(): 0, or NaN for a row that is not finite.
        values += (rows * 0.0).sum(1, keepdim=True)
        return torch.zeros_like(rows).scatter_(1, index, values)

    def supports(self, keys: Sequence[Key], numel: int) -> NDArray[np.int64]:
        """Return the entries that each key keeps of `numel`; (keys, k), each row ascending."""
        return np.stack([_draw(key, numel, self.kept(numel)) for key in keys])

    def subtract(self, encoded: Encoded, x: Tensor, key: Key, weight: float = 1.0) -> None:
        index = self._support(x, key) if encoded.index is None else encoded.index
        x.index_add_(0, index, encoded.parts[0].to(x.dtype), alpha=-weight)

    def accumulate(
        self, messages: Sequence[Parts], out: Tensor, key: Key, weight: float = 1.0
    ) -> None:
        index = self._support(out, key)
        # No index occurs twice, so index_add_ gives the same result in any order of its threads.
        for (values,) in messages:
            out.index_add_(0, index, values.to(out.dtype), alpha=weight)

    def alpha(self, numel: int) -> float | None:
        if self.unbiased:
            return None
        return self.kept(numel) / numel if numel else 1.0

    def omega(self, numel: int) -> float | None:
        return self._scale(numel) - 1.0 if self.unbiased else None

    def _scale(self, numel: int) -> float:
        return numel / self.kept(numel) if self.unbiased and numel else 1.0

    def _support(self, x: Tensor, key: Key) -> Tensor:
        return drawn(_draw, key, x.numel(), self.kept(x.numel()), like=x)


# Each bucket needs its support twice in a row: to encode and to decode.
@lru_cache(maxsize=1)
def _draw(key: Key, numel: int, k: int) -> NDArray[np.int64]:
    # Draw on the host: torch's generators draw different numbers on CPU and on CUDA, and all ranks
    # must keep the same entries. Sort the indices for memory locality.
    chosen = key.shared().choice(numel, k, replace=False, shuffle=False)
    chosen.sort()
    return chosen
