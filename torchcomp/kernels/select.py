"""Exact selection of the k entries of largest magnitude, by the same rule in every form.

NaN and infinities rank equal, and above every finite number. Of equal magnitudes, the lowest index
wins. :mod:`.select_numba` is for the CPU and :mod:`.selection_triton` for CUDA.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcomp.kernels.segments import Segment, joined, part


def largest(x: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Return the ascending indices of the k largest magnitudes of each segment, with NumPy."""
    chosen = [torch.arange(0)]
    for segment in segments:
        magnitude = _magnitude(part(x, segment))
        # NumPy has no bfloat16 and is slow with float16. Both convert to float32 exactly.
        wide = magnitude.to(torch.promote_types(magnitude.dtype, torch.float32)).numpy()
        chosen.append(torch.from_numpy(_largest_of(wide, segment.k)) + segment.start)
    return torch.cat(chosen)


def _largest_of(magnitude: NDArray[np.floating], k: int) -> NDArray[np.int64]:
    if k in (0, magnitude.size):
        return np.arange(k)
    # A full sort is not needed: partition only puts the k-th largest where a sort would. It is
    # vectorized and many times faster than torch.topk.
    threshold = np.partition(magnitude, -k)[-k]
    above = np.flatnonzero(magnitude > threshold)
    # flatnonzero ascends, so this keeps the ties with the lowest indices.
    tied = np.flatnonzero(magnitude == threshold)[: k - above.size]
    return np.sort(np.concatenate([above, tied]))


def largest_static(x: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Like :func:`largest`, with static shapes: the host never waits for an accelerator."""
    chosen = []
    for segment in segments:
        index = _largest_static_of(_magnitude(part(x, segment)), segment.k)
        chosen.append(index + segment.start if segment.start else index)
    return joined(chosen) if chosen else torch.arange(0, device=x.device)


def _largest_static_of(magnitude: Tensor, k: int) -> Tensor:
    if k in (0, magnitude.numel()):
        return torch.arange(k, device=magnitude.device)
    threshold = torch.topk(magnitude, k).values[-1:]
    above, tied = magnitude > threshold, magnitude == threshold
    # The running count of ties keeps those with the lowest indices.
    chosen = above | (tied & (tied.cumsum(0) <= k - above.sum()))
    return torch.nonzero_static(chosen, size=k).view(-1)


def _magnitude(x: Tensor) -> Tensor:
    return x.detach().abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
