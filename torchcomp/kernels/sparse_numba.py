"""Kernels of sparse messages in Numba, for the CPU. Results equal those of plain torch bit for bit.

Segments are handled one after another, each by several threads if it is long. Python does little
for one segment, because most buckets are one vector.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchcomp.kernels import (
    elias_fano,
    elias_fano_numba,
    entries_numba,
    quantize_numba,
    sparse,
)
from torchcomp.kernels.cast import narrow
from torchcomp.kernels.select_numba import SUMS, Candidates
from torchcomp.kernels.vectors import Prepared
from torchcomp.routes.wire import Parts

_WIDE = (torch.float32, torch.float64)
"""The dtypes of vectors that entries are subtracted from and added to here."""


class SparseNumba(sparse.Sparse):
    """See :class:`torchcomp.kernels.sparse.Sparse`."""

    def __init__(self, vectors: Prepared, fmt: str | None) -> None:
        super().__init__(vectors, fmt)
        # A workspace each, because a selection begins at the last threshold of its own vector.
        self._candidates: list[Candidates | None] = [None] * len(self.segments)
        self._total = sum(self.counts)
        # The width of the code's low parts, or None if nothing or everything is sent.
        self._nbytes = [elias_fano.nbytes(n, k) for _, n, k in self.segments]
        self._low = [elias_fano.low_bits(n, k) if 0 < k < n else None for _, n, k in self.segments]

    def select(self, x: Tensor) -> Tensor:
        return self._select(x.detach().contiguous(), None, None)

    def add_and_select(self, g: Tensor, e: Tensor, out: Tensor) -> Tensor:
        contiguous = g.is_contiguous() and e.is_contiguous() and out.is_contiguous()
        if not contiguous or (g.dtype, e.dtype, out.dtype) not in SUMS:
            return super().add_and_select(g, e, out)
        return self._select(out.detach(), g.detach(), e.detach())

    def _select(self, x: Tensor, g: Tensor | None, e: Tensor | None) -> Tensor:
        chosen = []
        for i, (start, n, k) in enumerate(self.segments):
            own, first, second = x, g, e
            if n < x.numel():
                part = slice(start, start + n)
                own = x[part]
                if g is not None and e is not None:
                    first, second = g[part], e[part]
            if self._low[i] is None:
                if first is not None and second is not None:
                    torch.add(first, second, out=own)
                index = torch.arange(k)
            else:
                candidates = self._candidates[i]
                if candidates is None or candidates.dtype != x.dtype:
                    candidates = self._candidates[i] = Candidates(n, k, x.dtype)
                index = candidates.select(own, first, second)
            chosen.append(index.add_(start) if start else index)
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen)

    def encode(self, x: Tensor, index: Tensor, noise: Tensor | None) -> Sequence[Parts]:
        known, dtype = self.vectors.fields, self.vectors.dtype
        plain = self.fmt is None and len(self.counts) == 1
        into = known[0][0] if known and plain and x.dtype == dtype else None
        values = torch.index_select(x.detach(), 0, index, out=into)
        if values.dtype != dtype:
            values = narrow(values, dtype)
        fields: Sequence[Parts] = ((values,),)
        if not plain:
            fields = quantize_numba.encode(values, self.counts, self.fmt, noise)
        message, first = [], 0
        for i, (start, n, k) in enumerate(self.segments):
            own = index if k == self._total else index[first : first + k]
            first += k
            low = self._low[i]
            code = known[i][-1] if known else torch.empty(self._nbytes[i], dtype=torch.uint8)
            if low is not None:
                local = own - start if start else own
                if not elias_fano_numba.encode(local, n, low, code):
                    elias_fano.check(False, n)
            message.append((*fields[i], code))
        return message

    def subtract(
        self, index: Tensor, parts: Sequence[Parts], x: Tensor, weight: float = 1.0
    ) -> None:
        if x.dtype not in _WIDE or not x.is_contiguous():
            super().subtract(index, parts, x, weight)
            return
        first = 0
        for own, k in zip(parts, self.counts, strict=True):
            chosen = index if k == self._total else index[first : first + k]
            first += k
            entries_numba.subtract(x, chosen, own, weight)

    def accumulate(
        self, messages: Sequence[Sequence[Parts]], out: Tensor, weight: float = 1.0
    ) -> None:
        if not messages or out.dtype not in _WIDE or not out.is_contiguous():
            super().accumulate(messages, out, weight)
            return
        for i, segment in enumerate(self.segments):
            own = (
                out if segment.n == out.numel() else out[segment.start : segment.start + segment.n]
            )
            low = self._low[i]
            if low is None:
                alone = [[message[i]] for message in messages]
                sparse.accumulate(alone, [segment._replace(start=0)], own, weight)
            elif not entries_numba.accumulate(messages, i, segment.k, low, own, weight):
                # All of it: each rank looks at a part for a NaN.
                out.fill_(torch.nan)
