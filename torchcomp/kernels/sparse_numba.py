"""Kernels of sparse messages in Numba, for the CPU. Results equal those of plain torch bit for bit.

The codes of messages are decoded and checked first. Their values are then added block by block of
the vector, in order in each block, while the block is in the cache.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from torchcomp.kernels import elias_fano, elias_fano_numba, pool, quantize_numba, sparse
from torchcomp.kernels.cast import narrow
from torchcomp.kernels.numba_jit import kernel
from torchcomp.kernels.quantize_numba import value_at
from torchcomp.kernels.segments import Prepared, part
from torchcomp.kernels.select_numba import Candidates
from torchcomp.routes.wire import Parts

_BLOCK = 1 << 17
"""Number of elements of a block of the vector, which fits into a cache."""

_TOGETHER = 1 << 20
"""Number of entries that are decoded at once, which limits the memory for it."""

_WIDE = (torch.float32, torch.float64)
"""The dtypes of vectors that summands, and entries, are added to and subtracted from here."""


class SparseNumba(sparse.Sparse):
    """See :class:`torchcomp.kernels.sparse.Sparse`."""

    def __init__(self, vectors: Prepared, fmt: str | None) -> None:
        super().__init__(vectors, fmt)
        self._candidates: list[Candidates | None] = [None] * len(self.segments)
        self._total = sum(self.counts)
        # The width of the code's low parts, or None if nothing or everything is sent.
        self._nbytes = [elias_fano.nbytes(n, k) for _, n, k in self.segments]
        self._low = [elias_fano.low_bits(n, k) if 0 < k < n else None for _, n, k in self.segments]

    def select(self, x: Tensor) -> Tensor:
        return self._select(x.detach().contiguous(), None, None)

    def add_and_select(self, g: Tensor, e: Tensor, out: Tensor) -> Tensor:
        contiguous = g.is_contiguous() and e.is_contiguous() and out.is_contiguous()
        if not contiguous or not g.dtype == e.dtype == out.dtype or out.dtype not in _WIDE:
            return super().add_and_select(g, e, out)
        return self._select(out.detach(), g.detach(), e.detach())

    def _select(self, x: Tensor, g: Tensor | None, e: Tensor | None) -> Tensor:
        chosen = []
        for i, segment in enumerate(self.segments):
            start, n, k = segment
            own = part(x, segment)
            first, second = (None if y is None else part(y, segment) for y in (g, e))
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
        values = narrow(torch.index_select(x.detach(), 0, index, out=into), dtype)
        fields: Sequence[Parts] = ((values,),)
        if not plain:
            fields = quantize_numba.encode(values, self.counts, self.fmt, noise)
        message, first = [], 0
        for i, (start, n, k) in enumerate(self.segments):
            own = index[first : first + k]
            first += k
            low = self._low[i]
            code = known[i][-1] if known else torch.empty(self._nbytes[i], dtype=torch.uint8)
            if low is not None:
                local = own - start if start else own
                elias_fano.check(elias_fano_numba.encode(local.numpy(), n, low, code.numpy()), n)
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
            chosen = index[first : first + k].numpy()
            first += k
            _subtract(x.detach().numpy(), chosen, *_values(own, x.dtype), weight)

    def accumulate(
        self, messages: Sequence[Sequence[Parts]], out: Tensor, weight: float = 1.0
    ) -> None:
        if not messages or out.dtype not in _WIDE or not out.is_contiguous():
            super().accumulate(messages, out, weight)
            return
        for i, segment in enumerate(self.segments):
            alone, own = [message[i] for message in messages], part(out, segment)
            together = max(_TOGETHER // max(segment.k, 1), 1)
            for first in range(0, len(alone), together):
                some = alone[first : first + together]
                if not _accumulate(some, segment.k, self._low[i], own, weight):
                    # All of it: each rank looks at a part for a NaN.
                    out.fill_(torch.nan)
                    return


def _accumulate(
    messages: Sequence[Parts], k: int, low: int | None, out: Tensor, weight: float
) -> bool:
    """Add one segment of each message, or return False if a code is damaged."""
    target, count = out.detach().numpy(), len(messages)
    codes = [message[-1].contiguous().numpy() for message in messages]
    values = [_values(message, out.dtype) for message in messages]
    index, intact = np.empty((count, k), np.int64), np.empty(count, np.bool_)
    n = target.size

    def decode(i: int) -> None:
        if low is None:
            index[i], intact[i] = np.arange(k), True
        else:
            intact[i] = elias_fano_numba.decode(codes[i], n, low, index[i])

    def add_up(block: int) -> None:
        for i in range(count):
            _add(target, index[i], *values[i], weight, block * size, (block + 1) * size)

    if pool.chunks(count * k) == 1:
        size = n
        for i in range(count):
            decode(i)
    else:
        size = _BLOCK
        pool.each(decode, count)
    if intact.all():
        pool.each(add_up, -(-n // max(size, 1)))
    return bool(intact.all())


def _values(parts: Parts, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return the values or codes of a message, and its scales; anything if it has none."""
    *scale, codes, _ = parts
    values = (codes if scale else codes.to(dtype)).contiguous().numpy()
    return values, scale[0].contiguous().numpy() if scale else values


@kernel()
def _subtract(x, index, values, scales, weight):
    """Compute ``x[index] -= weight * values`` in place, where the values are finite."""
    # In the dtype of `x`: a float64 factor would change the rounding compared with plain torch.
    factor = x.dtype.type(-weight)
    for i in range(np.uint64(index.size)):
        value = value_at(values, scales, i)
        if np.isfinite(value):
            x[np.uint64(index[i])] += factor * value


@kernel()
def _add(out, index, values, scales, weight, begin, end):
    """Add the entries of a message whose index is at least `begin` and below `end`."""
    factor = out.dtype.type(weight)
    for i in range(np.uint64(np.searchsorted(index, begin)), np.uint64(index.size)):
        at = np.uint64(index[i])
        if at >= np.uint64(end):
            break
        out[at] += factor * value_at(values, scales, i)
