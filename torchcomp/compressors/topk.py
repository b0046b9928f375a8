"""TopK: keep the k entries of largest magnitude."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
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
        1-D int64 tensor of `k` distinct indices, on the device of `x`.
    """
    if k in (0, x.numel()):
        return torch.arange(k, device=x.device)
    magnitude = x.detach().abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
    select = largest_on_host if x.device.type == "cpu" else largest_on_device
    return select(magnitude, k)


def largest_on_host(magnitude: Tensor, k: int) -> Tensor:
    """The selection by NumPy, whose partition is vectorised: many times faster than torch.topk."""
    # NumPy knows no bfloat16 and is slow at float16; both convert exactly.
    wide = magnitude.to(torch.promote_types(magnitude.dtype, torch.float32)).numpy()
    threshold = np.partition(wide, -k)[-k]
    above = np.flatnonzero(wide > threshold)
    tied = np.flatnonzero(wide == threshold)[: k - above.size]
    return torch.from_numpy(np.sort(np.concatenate([above, tied])))


def largest_on_device(magnitude: Tensor, k: int) -> Tensor:
    """The selection in static shapes, so that the host never waits for an accelerator."""
    threshold = torch.topk(magnitude, k, sorted=False).values.min()
    above = magnitude > threshold
    tied = magnitude == threshold
    room = k - above.sum()
    chosen = above | (tied & (tied.cumsum(0) <= room))
    return torch.nonzero_static(chosen, size=k).squeeze(1)
