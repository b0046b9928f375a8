"""Identity: send the vector unchanged."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchcomp.compressors.base import Compressor, Encoded
from torchcomp.keys import Key
from torchcomp.wire import Field, Layout, Parts


@dataclass(frozen=True)
class Identity(Compressor):
    """``identity``: send every value unchanged.

    alpha = 1 and omega = 0.
    """

    name: ClassVar[str] = "identity"
    summable: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    def layout(self, numel: int, dtype: torch.dtype) -> Layout:
        return (Field("values", dtype, numel),)

    def encode(self, x: Tensor, key: Key) -> Encoded:
        return Encoded((x,))  # no copy: the message shares the memory of `x`

    def round_trips(self, rows: Tensor, keys: Sequence[Key]) -> Tensor:
        return rows.clone()

    def accumulate(
        self, messages: Sequence[Parts], out: Tensor, key: Key, weight: float = 1.0
    ) -> None:
        for (values,) in messages:
            out.add_(values, alpha=weight)

    def decode(self, parts: Parts, out: Tensor, key: Key) -> Tensor:
        # After an in-place all-reduce of a bucket, the message already is `out`.
        return out if parts[0].data_ptr() == out.data_ptr() else out.copy_(parts[0])

    def alpha(self, numel: int) -> float:
        return 1.0

    def omega(self, numel: int) -> float:
        return 0.0
