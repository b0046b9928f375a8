"""TopK: keep the k entries of largest magnitude."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torchcomp.compressors.sparse import Sparsifier
from torchcomp.keys import Key
from torchcomp.wire import Field, Layout, Parts, index_dtype


@dataclass(frozen=True)
class TopK(Sparsifier):
    """``topk(0.01)`` or ``topk(k=5)``: contractive with alpha = k/n.

    Among equal magnitudes the lowest index wins, so the result is the same on every machine. NaN
    and infinities rank above every number. Reference: Stich, Cordonnier, Jaggi, "Sparsified SGD
    with memory", NeurIPS 2018.
    """

    name: ClassVar[str] = "topk"

    def layout(self, numel: int, dtype: torch.dtype) -> Layout:
        k = self.kept(numel)
        return (Field("index", index_dtype(numel), k), Field("values", dtype, k))

    def compress(self, x: Tensor, key: Key) -> Parts:
        index = largest(x, self.kept(x.numel()))
        return index.to(index_dtype(x.numel())), x[index]

    def accumulate(self, parts: Parts, out: Tensor, key: Key, weight: float = 1.0) -> None:
        index, values = parts
        out.index_add_(0, index.long(), values.to(out.dtype), alpha=weight)

    def alpha(self, numel: int) -> float:
        return self.kept(numel) / numel if numel else 1.0

    def omega(self, numel: int) -> None:
        return None


def largest(x: Tensor, k: int) -> Tensor:
    """Indices, ascending, of the `k` entries of largest magnitude; ties go to the lowest index.

    Args:
        x: 1-D floating-point tensor; NaN counts as infinite.
        k: at most ``x.numel()``.

    Returns:
        1-D int64 tensor of `k` distinct indices, on the device of `x`, without a host sync.
    """
    if k in (0, x.numel()):
        return torch.arange(k, device=x.device)
    magnitude = x.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
    threshold = torch.topk(magnitude, k, sorted=False).values.min()
    above = magnitude > threshold
    tied = magnitude == threshold
    room = k - above.sum()
    chosen = above | (tied & (tied.cumsum(0) <= room))
    return torch.nonzero_static(chosen, size=k).squeeze(1)
