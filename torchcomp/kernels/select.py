"""Exact selection of the k entries of largest magnitude.

NaN and infinities rank equal, and above every finite number. Among equal magnitudes the lowest
index wins. The result is therefore the same on every machine and in every form. Plain torch and
NumPy are the reference, :mod:`.select_numba` is for the CPU and :mod:`.select_triton` for CUDA.
"""

from collections.abc import Iterable, Sequence
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from torchcomp import host
from torchcomp.kernels import backend
from torchcomp.kernels.segments import Segment, add, joined, part


class Scratch:
    """A workspace that makes the selection from similar vectors faster from step to step.

    It never affects the result, and any instance can be used with any vector. Only one thread can
    use an instance at a time.
    """

    def __init__(self) -> None:
        # Private to the form that ran last. A form must check the type before it uses this.
        self.kept: object = None


def largest(x: Tensor, k: int, scratch: Scratch | None = None) -> Tensor:
    """Return the indices of the `k` entries of `x` with the largest magnitude.

    Args:
        x: 1-D, fp16, bf16, fp32 or fp64.
        k: number of entries to select.
        scratch: the workspace of the last call for a similar vector.

    Returns:
        1-D int64, ascending.
    """
    # The fast forms require 0 < k < n.
    if k in (0, x.numel()):
        return torch.arange(k, device=x.device)
    form = _fast(x)
    if form is not None:
        chosen: Tensor = form.select(x.detach().contiguous(), k, scratch or Scratch(), None)
        return chosen
    magnitude = x.detach().abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
    return largest_on_host(magnitude, k) if host.can_read(x) else largest_on_device(magnitude, k)


def add_and_select(
    g: Tensor, e: Tensor, out: Tensor, k: int, scratch: Scratch | None = None
) -> Tensor:
    """Compute ``torch.add(g, e, out=out)`` and :func:`largest` of `out`, in one pass if possible.

    All three tensors are 1-D with equal length, and their dtypes can differ. `out` must not share
    memory with `g` or `e`.
    """
    form = _adding(g, e, out) if 0 < k < out.numel() else None
    if form is not None:
        summands = g.detach(), e.detach()
        chosen: Tensor = form.select(out.detach(), k, scratch or Scratch(), summands)
        return chosen
    torch.add(g, e, out=out)
    return largest(out, k, scratch)


def _adding(g: Tensor, e: Tensor, out: Tensor) -> ModuleType | None:
    """Return the form that adds `g` and `e` in the pass that selects from the sum, or None."""
    form = _fast(out)
    if form is None or (g.dtype, e.dtype, out.dtype) not in form.SUMS:
        return None
    return form if all(x.is_contiguous() for x in (g, e, out)) else None


def _fast(x: Tensor) -> ModuleType | None:
    """Return the form that selects from `x` faster than the reference, or None.

    A form has a function ``select(x, k, scratch, summands)`` for 0 < k < n and contiguous tensors.
    If `summands` is not None, the function first writes their sum to `x`. A form for accelerators
    also has ``select_all(x, segments, scratch, summands)``, with one scratch for all segments of
    any k. The constants ``DTYPES``, ``LIMIT`` and ``SUMS`` list what the form supports.
    """
    form = backend.fast_form("select", x.device.type)
    return form if form and x.dtype in form.DTYPES and x.numel() < form.LIMIT else None


def largest_on_host(magnitude: Tensor, k: int) -> Tensor:
    """Select with NumPy. Its partition is vectorized and many times faster than torch.topk."""
    # NumPy has no bfloat16 and is slow with float16. Both convert to float32 exactly.
    wide = magnitude.to(torch.promote_types(magnitude.dtype, torch.float32)).numpy()
    # A full sort is not needed: partition only puts the k-th largest where a sort would.
    threshold = np.partition(wide, -k)[-k]
    above = np.flatnonzero(wide > threshold)
    # flatnonzero ascends, so this keeps the ties with the lowest indices.
    tied = np.flatnonzero(wide == threshold)[: k - above.size]
    return torch.from_numpy(np.sort(np.concatenate([above, tied])))


def largest_on_device(magnitude: Tensor, k: int) -> Tensor:
    """Select with static shapes, so that the host never waits for an accelerator."""
    return _positions(_largest_of_rows(magnitude[None], [k]).view(-1), k)


def largest_all(x: Tensor, segments: Sequence[Segment], scratch: Sequence[Scratch] = ()) -> Tensor:
    """Return the indices of the k largest magnitudes of each segment.

    Args:
        x: 1-D, as for :func:`largest`.
        segments: parts of `x`, in ascending order.
        scratch: the workspaces of the segments; can be empty.

    Returns:
        1-D int64, indices within `x`: those of the first segment, of the second, and so on.
    """
    if not host.can_read(x):
        return _largest_together(x, segments, scratch)
    each: Sequence[Scratch | None] = scratch or [None] * len(segments)
    chosen = (largest(part(x, s), s.k, kept) for s, kept in zip(segments, each, strict=True))
    return _placed(chosen, segments, x)


def add_and_select_all(
    g: Tensor,
    e: Tensor,
    out: Tensor,
    segments: Sequence[Segment],
    scratch: Sequence[Scratch] = (),
) -> Tensor:
    """Write ``g + e`` to `out` in the segments, and select from it; see :func:`largest_all`."""
    if not host.can_read(out):
        # The form leaves out segments of which nothing is selected.
        form = _adding(g, e, out) if all(segment.k for segment in segments) else None
        if form is not None:
            summands = g.detach(), e.detach()
            chosen: Tensor = form.select_all(out.detach(), segments, _first(scratch), summands)
            return chosen
        torch.add(g, e, out=out)
        return _largest_together(out, segments, scratch)
    each: Sequence[Scratch | None] = scratch or [None] * len(segments)
    parts = (
        add_and_select(part(g, s), part(e, s), part(out, s), s.k, kept)
        for s, kept in zip(segments, each, strict=True)
    )
    return _placed(parts, segments, out)


def _largest_together(x: Tensor, segments: Sequence[Segment], scratch: Sequence[Scratch]) -> Tensor:
    """Select from all segments at once, without a wait for an accelerator."""
    form = _fast(x)
    if form is not None:
        chosen: Tensor = form.select_all(x.detach().contiguous(), segments, _first(scratch), None)
        return chosen
    groups = _of_similar_length(segments)
    return joined([_largest_of_group(x, group) for group in groups] or [_none(x)])


def _first(scratch: Sequence[Scratch]) -> Scratch:
    """Return the scratch for all segments together."""
    return scratch[0] if scratch else Scratch()


def _placed(chosen: Iterable[Tensor], segments: Sequence[Segment], x: Tensor) -> Tensor:
    """Return indices within segments as indices within `x`."""
    pairs = zip(chosen, segments, strict=True)
    return joined([index + s.start if s.start else index for index, s in pairs] or [_none(x)])


def _none(x: Tensor) -> Tensor:
    return torch.arange(0, device=x.device)


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
    within = x[first : segments[-1].span.stop].detach()
    magnitude = within.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
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
    return add(_positions(chosen, sum(counts)), first)


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


def _positions(chosen: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` elements that are true."""
    return torch.nonzero_static(chosen, size=count).view(-1)
