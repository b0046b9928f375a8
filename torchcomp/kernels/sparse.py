"""Kernels of sparse messages: select entries of a tensor, encode them, subtract and add them.

A message with k of n entries has the values, in ascending order of their index and in a format of
:mod:`.quantize`, and the Elias-Fano code of the indices.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchcomp.engine import host
from torchcomp.kernels import backend, elias_fano, quantize, select
from torchcomp.kernels.cast import narrow
from torchcomp.kernels.segments import Prepared, ascend, batches, joined, split
from torchcomp.routes.wire import Parts


def kernels_for(vectors: Prepared, fmt: str | None) -> "Sparse":
    """Return the fastest kernels for the vectors of a tensor."""
    like = torch.empty(0, device=vectors.device)
    if numba := backend.host_form("sparse", like):
        return numba.SparseNumba(vectors, fmt)  # type: ignore[no-any-return]
    triton = backend.device_form("sparse", like)
    if triton and ascend(vectors.segments):
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
        if self._plain:
            return [(values, codes[0])]
        drawn = [None] * len(codes) if noise is None else split(noise, self.counts)
        each = zip(split(values, self.counts), drawn, codes, strict=True)
        return [(*self._encode_values(own, self.fmt, some), code) for own, some, code in each]

    def _coded(self, index: Tensor) -> Sequence[Tensor]:
        """Return the index code of each segment."""
        codes = []
        for own, (start, n, k) in zip(split(index, self.counts), self.segments, strict=True):
            if self._on_host:
                inside = k == 0 or bool(own[0] >= start and own[-1] < start + n)
                elias_fano.check(inside and bool((own[1:] > own[:-1]).all()), n)
            codes.append(elias_fano.encode(own - start if start else own, n))
        return codes

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
            each = zip(parts, self.counts, strict=True)
            values = joined([quantize.decode([own[:-1]], k, x.dtype)[0] for own, k in each])
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
        for i, (start, n, k) in enumerate(self.segments):
            own = out[start : start + n]
            for some in batches(messages, i, k):
                values = quantize.decode([fields for *fields, _ in some], k, out.dtype)
                index, damaged = elias_fano.decode([code for *_, code in some], n, k)
                for at, added in zip(index, values, strict=True):
                    own.index_add_(0, at, added, alpha=weight)
                # Reading `damaged` would make the host wait.
                out.masked_fill_(damaged, torch.nan)

    def mean(self, messages: Sequence[Sequence[Parts]], out: Tensor, divisor: int) -> None:
        """Write the sum of all messages, in order, divided by `divisor`, to `out`."""
        self.accumulate(messages, out.zero_())
        if divisor != 1:
            out.div_(divisor)
