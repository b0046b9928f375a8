"""Kernels of sparse messages: select entries of a tensor, encode them, subtract and add them.

A message with k of n entries has the values, in ascending order of their index and in a format of
:mod:`.quantize`, and the Elias-Fano code of the indices.
"""

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from torchcomp.engine import host
from torchcomp.kernels import backend, elias_fano, quantize, select
from torchcomp.kernels.cast import narrow
from torchcomp.kernels.segments import TOGETHER, Prepared, batches, joined, runs, split
from torchcomp.routes.wire import Parts


def kernels_for(vectors: Prepared, fmt: str | None) -> "Sparse":
    """Return the fastest kernels for the vectors of a tensor."""
    like = torch.empty(0, device=vectors.device)
    if numba := backend.host_form("sparse", like):
        return numba.SparseNumba(vectors, fmt)  # type: ignore[no-any-return]
    triton = backend.device_form("sparse", like)
    if triton and len(runs(vectors.segments)) == 1:
        return triton.SparseTriton(vectors, fmt)  # type: ignore[no-any-return]
    return Sparse(vectors, fmt)


class Sparse:
    """The kernels in plain torch and NumPy. On an accelerator, all shapes are static."""

    reads_frames = False
    """Whether ``mean_of`` decodes frames where they arrived."""

    _encode_values = staticmethod(quantize.encode)

    def __init__(self, vectors: Prepared, fmt: str | None) -> None:
        self.vectors, self.fmt = vectors, fmt
        self.segments = vectors.segments
        self.counts = [segment.k for segment in vectors.segments]
        # One vector, whose values are sent as they are, takes few calls.
        self._plain = fmt is None and len(self.counts) == 1
        self._on_host = host.can_read(torch.empty(0, device=vectors.device))

    def select(self, x: Tensor) -> Tensor:
        """Return the indices of the k largest magnitudes of each segment, ascending in each."""
        largest = select.largest if self._on_host else select.largest_static
        return largest(x, self.segments)

    def add_and_select(self, g: Tensor, e: Tensor, out: Tensor) -> Tensor:
        """Write ``g + e`` to `out`, in other memory, and :meth:`select` from it."""
        torch.add(g, e, out=out)
        return self.select(out)

    def encode(self, x: Tensor, index: Tensor, noise: Tensor | None) -> Sequence[Parts]:
        """Return the fields of each segment's message."""
        codes = self._coded(index)
        values = x.detach().index_select(0, index)
        if values.dtype != self.vectors.dtype:
            values = narrow(values, self.vectors.dtype)
        fields: Sequence[Parts] = ((values,),)
        if not self._plain:
            fields = self._encode_values(values, self.counts, self.fmt, noise)
        return [(*own, code) for own, code in zip(fields, codes, strict=True)]

    def _coded(self, index: Tensor) -> Sequence[Tensor]:
        """Return the index code of each segment."""
        if self._on_host:
            for own, (start, n, _) in zip(split(index, self.counts), self.segments, strict=True):
                inside = own.numel() == 0 or bool(own[0] >= start and own[-1] < start + n)
                elias_fano.check(inside and bool((own[1:] > own[:-1]).all()), n)
        return elias_fano.encode(index, self.segments)

    def encode_sum(
        self, g: Tensor, e: Tensor, rest: Tensor, noise: Tensor | None
    ) -> tuple[Sequence[Parts], Tensor]:
        """Encode ``g + e``, and write to `rest` what the message lacks; also return the indices."""
        index = self.add_and_select(g, e, rest)
        parts = self.encode(rest, index, noise)
        self.subtract(index, parts, rest)
        return parts, index

    def subtract(
        self, index: Tensor, parts: Sequence[Parts], x: Tensor, weight: float = 1.0
    ) -> None:
        """Subtract `weight` times a message, with these indices, from `x`, where it is finite."""
        if self._plain:
            values = parts[0][0].to(x.dtype)
        else:
            values = joined(quantize.decode([own[:-1] for own in parts], self.counts, x.dtype))
        # Replace instead of masking: a boolean index would make the host wait for an accelerator.
        values = torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
        # Not alpha=-weight: it can fuse both operations, and the Numba form rounds the product.
        x.index_add_(0, index, values if weight == 1 else values * weight, alpha=-1)

    def accumulate(
        self, messages: Sequence[Sequence[Parts]], out: Tensor, weight: float = 1.0
    ) -> None:
        """Add `weight` times each message to `out`, in order.

        If an index code is damaged, all of `out` becomes NaN, which stops the step on all ranks:
        each looks at a part of it.
        """
        segments = self.segments
        cuts = runs(segments)
        each = [(segments[cut], message[cut]) for message in messages for cut in cuts]
        sizes = [sum(segment.k for segment in some) for some, _ in each]
        # As many at once as memory allows: each launch on an accelerator delays the backward pass.
        for batch in batches(sizes, TOGETHER):
            every = [segment for some, _ in each[batch] for segment in some]
            parts = [own for _, message in each[batch] for own in message]
            counts = [segment.k for segment in every]
            values = iter(quantize.decode([fields for *fields, _ in parts], counts, out.dtype))
            index, damaged = elias_fano.decode([code for *_, code in parts], every)
            for at, (some, _) in zip(split(index, sizes[batch]), each[batch], strict=True):
                out.index_add_(0, at, joined(list(islice(values, len(some)))), alpha=weight)
            # Reading `damaged` would make the host wait.
            out.masked_fill_(damaged, torch.nan)

    def mean(self, messages: Sequence[Sequence[Parts]], out: Tensor, divisor: int) -> None:
        """Write the sum of all messages, in order, divided by `divisor`, to `out`."""
        self.accumulate(messages, out.zero_())
        if divisor != 1:
            out.div_(divisor)
