"""Exact selection in Triton, for CUDA: kernels of :mod:`.sparse_triton`, prepared when needed."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchcomp.kernels.segments import Segment
from torchcomp.kernels.select import Scratch
from torchcomp.kernels.sparse_triton import DTYPES, LIMIT, SparseTriton
from torchcomp.kernels.triton_jit import on_device_of

SUMS = tuple((dtype, torch.float32, torch.float32) for dtype in DTYPES)
"""Supported dtypes of two summands and their sum."""

__all__ = ["DTYPES", "LIMIT", "SUMS", "select", "select_all"]


@dataclass(frozen=True)
class _Kept:
    """What stays in a scratch between steps."""

    kernels: SparseTriton
    task: tuple[tuple[Segment, ...], int, torch.device]


def select(x: Tensor, k: int, scratch: Scratch, summands: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return the indices that :func:`torchcomp.kernels.select.add_and_select` returns."""
    return select_all(x, [Segment(0, x.numel(), k)], scratch, summands)


def select_all(
    x: Tensor,
    segments: Sequence[Segment],
    scratch: Scratch,
    summands: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Return the indices that :func:`torchcomp.kernels.select.add_and_select_all` returns.

    Args:
        x: 1-D, contiguous, of one of DTYPES, with less than LIMIT elements.
        segments: disjoint parts of `x`.
        scratch: one workspace for all segments.
        summands: None, or two contiguous tensors of the size of `x`, to write their sum to `x`.
    """
    task = tuple(segments), x.numel(), x.device
    if not isinstance(scratch.kept, _Kept) or scratch.kept.task != task:
        with on_device_of(x):
            kernels = SparseTriton(*task[:2], None, torch.float32, x.device, wait=False)
        scratch.kept = _Kept(kernels, task)
    kernels = scratch.kept.kernels
    return kernels.select(x) if summands is None else kernels.add_and_select(*summands, x)
