"""Kernels of sparse messages in Numba, for the CPU. Results equal those of plain torch bit for bit.

The codes of messages are decoded and checked first. Their values are then added block by block of
the vector, in order in each block, while the block is in the cache.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from torchcomp.kernels import elias_fano, elias_fano_numba, pool, quantize_numba, sparse
from torchcomp.kernels.numba_jit import kernel
from torchcomp.kernels.segments import Prepared, batches
from torchcomp.kernels.select_numba import Candidates
from torchcomp.routes.wire import Parts

_BLOCK = 1 << 17
"""Number of elements of a block of the vector, which fits into a cache."""

_WIDE = (torch.float32, torch.float64)
"""The dtypes of vectors that summands and entries are added to here."""


class SparseNumba(sparse.Sparse):
    """See :class:`torchcomp.kernels.sparse.Sparse`."""

    _encode_values = staticmethod(quantize_numba.encode)

    def __init__(self, vectors: Prepared, fmt: str | None) -> None:
        super().__init__(vectors, fmt)
        self._candidates: list[Candidates | None] = [None] * len(self.segments)
        self._nbytes = [elias_fano.nbytes(n, k) for _, n, k in self.segments]
        # The width of the code's low parts, or None if nothing or everything is sent.
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
        for i, (start, n, k) in enumerate(self.segments):
            own, first, second = x[start : start + n], None, None
            if g is not None and e is not None:
                first, second = g[start : start + n], e[start : start + n]
            if self._low[i] is not None:
                candidates = self._candidates[i]
                if candidates is None or candidates.dtype != x.dtype:
                    candidates = self._candidates[i] = Candidates(n, k, x.dtype)
                index = candidates.select(own, first, second)
            else:
                if first is not None and second is not None:
                    torch.add(first, second, out=own)
                index = torch.arange(k)
            chosen.append(index.add_(start) if start else index)
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen)

    def _coded(self, index: Tensor) -> Sequence[Tensor]:
        codes, first = [], 0
        for (start, n, k), low, nbytes in zip(self.segments, self._low, self._nbytes, strict=True):
            code = torch.empty(nbytes, dtype=torch.uint8)
            if low is not None:
                own = index[first : first + k]
                local = own - start if start else own
                if not elias_fano_numba.encode(local.numpy(), n, low, code.numpy()):
                    elias_fano.check(False, n)
            codes.append(code)
            first += k
        return codes

    def accumulate(
        self, messages: Sequence[Sequence[Parts]], out: Tensor, weight: float = 1.0
    ) -> None:
        if not messages or out.dtype not in _WIDE or not out.is_contiguous():
            super().accumulate(messages, out, weight)
            return
        for i, (start, n, k) in enumerate(self.segments):
            own = out[start : start + n]
            for some in batches(messages, i, k):
                if not _accumulate(some, k, self._low[i], own, weight):
                    # All of it: each rank looks at a part for a NaN.
                    out.fill_(torch.nan)
                    return


def _accumulate(
    messages: Sequence[Parts], k: int, low: int | None, out: Tensor, weight: float
) -> bool:
    """Add one segment of each message, or return False if a code is damaged."""
    target, count, n = out.detach().numpy(), len(messages), out.numel()
    index, intact = np.empty((count, k), np.int64), np.empty(count, np.bool_)
    codes = [code.contiguous().numpy() for *_, code in messages]
    fields = [own[:-1] for own in messages]
    decoded: Iterable[Tensor]
    if len(fields[0]) == 1:  # not copied, if they have this dtype
        decoded = [own.to(out.dtype).contiguous() for (own,) in fields]
    else:
        decoded = quantize_numba.decode(fields, k, out.dtype)
    values = [own.numpy() for own in decoded]

    def decode(i: int) -> None:
        if low is None:
            index[i], intact[i] = np.arange(k), True
        else:
            intact[i] = elias_fano_numba.decode(codes[i], n, low, index[i])

    def add_up(block: int) -> None:
        for i in range(count):
            _add(target, index[i], values[i], weight, block * size, (block + 1) * size)

    size = n if count * k <= pool.INLINE else _BLOCK
    if size == n:
        for i in range(count):
            decode(i)
    else:
        pool.each(decode, count)
    if intact.all():
        blocks = -(-n // max(size, 1))
        if blocks > 1:
            pool.each(add_up, blocks)
        else:
            add_up(0)
    return bool(intact.all())


@kernel()
def _add(out, index, values, weight, begin, end):
    """Add the entries of a message whose index is at least `begin` and below `end`."""
    factor = out.dtype.type(weight)
    for i in range(np.uint64(np.searchsorted(index, begin)), np.uint64(index.size)):
        at = np.uint64(index[i])
        if at >= np.uint64(end):
            break
        out[at] += factor * values[i]
