"""Exact selection of the k entries of largest magnitude, by the same rule in every form.

NaN and infinities rank equal, and above every finite number. Of equal magnitudes, the lowest index
wins. :mod:`.select_numba` is for the CPU and :mod:`.selection_triton` for CUDA.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcomp.engine import host
from torchcomp.kernels.segments import Segment, add, joined, part


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
    groups = _of_similar_length(segments)
    none = torch.arange(0, device=x.device)
    return joined([_largest_of_group(x, group) for group in groups] or [none])


def _magnitude(x: Tensor) -> Tensor:
    return x.detach().abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)


def _of_similar_length(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Return the segments that select anything, in groups to be handled as rows of a matrix."""
    some = [segment for segment in segments if segment.k]
    longest = max((segment.n for segment in some), default=0)
    # Rows are filled up to the longest, so a matrix of very uneven segments is mostly empty.
    if longest * len(some) <= 2 * sum(segment.n for segment in some):
        return [some] if some else []
    return [[segment] for segment in some]


def _largest_of_group(x: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Select from segments of similar lengths, as rows of a matrix."""
    first, longest = segments[0].start, max(segment.n for segment in segments)
    magnitude = _magnitude(x[first : segments[-1].span.stop])
    counts = [segment.k for segment in segments]
    if all(s.n == longest and s.start == first + i * longest for i, s in enumerate(segments)):
        chosen = _largest_of_rows(magnitude.view(-1, longest), counts).view(-1)
    else:
        # Below every magnitude, so that no filling is selected.
        filling = magnitude.new_full((longest,), -1.0)
        rows, at = [], first
        for segment in segments:
            rows += [magnitude[segment.start - first :][: segment.n], filling[segment.n :]]
        mask = _largest_of_rows(torch.cat(rows).view(-1, longest), counts)
        # Back to where the segments are in `x`. Nothing between them is chosen.
        parts = []
        for row, segment in zip(mask, segments, strict=True):
            parts += [mask.new_zeros(segment.start - at), row[: segment.n]]
            at = segment.span.stop
        chosen = torch.cat(parts)
    return add(torch.nonzero_static(chosen, size=sum(counts)).view(-1), first)


def _largest_of_rows(magnitude: Tensor, k: Sequence[int]) -> Tensor:
    """Select the k[i] largest of row i of a matrix. Return a mask of its shape."""
    most = max(k)
    top = torch.topk(magnitude, most, dim=1).values
    room: int | Tensor = most
    threshold = top[:, -1:]
    if min(k) < most:
        room = host.copy_to(torch.tensor(k), magnitude.device)[:, None]
        threshold = top.gather(1, room - 1)
    above, tied = magnitude > threshold, magnitude == threshold
    # The running count of ties keeps those with the lowest indices.
    return above | (tied & (tied.cumsum(1) <= room - above.sum(1, keepdim=True)))
