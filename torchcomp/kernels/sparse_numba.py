"""Kernels of sparse messages in Numba, for the CPU. Results equal those of plain torch bit for bit.

Messages are added block by block of the vector, in order in each block: there, the indices of each
message are decoded and checked and its values added, while the block is in the cache. Several
threads take a chunk of the vector each. A first look at the codes finds where each chunk starts.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]  # it does export carray
from numpy.typing import NDArray
from torch import Tensor

from torchcomp.kernels import elias_fano, elias_fano_numba, pool, quantize_numba, sparse
from torchcomp.kernels.cast import narrow
from torchcomp.kernels.elias_fano_numba import (
    ascends,
    decode_below,
    last_word,
    padding_is_zero,
    start_of,
)
from torchcomp.kernels.numba_jit import kernel, pointer
from torchcomp.kernels.quantize_numba import value_at
from torchcomp.kernels.segments import Prepared
from torchcomp.kernels.select_numba import SUMS, Candidates
from torchcomp.routes.wire import Parts

Array = NDArray[Any]

_BLOCK_BYTES = 1 << 17
"""Size of a block of the vector, chosen to fit into the L2 cache while messages are added."""

_LEAST = 1 << 9
"""Blocks are larger if a message would have fewer entries in them, on average."""

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
            _subtract_entries(x, chosen, own, weight)

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
            elif not _accumulate_entries(messages, i, segment.k, low, own, weight):
                # All of it: each rank looks at a part for a NaN.
                out.fill_(torch.nan)


def _subtract_entries(x: Tensor, index: Tensor, parts: Parts, weight: float) -> None:
    """Compute ``x[index] -= weight * values`` in place, where the values are finite."""
    *scale, codes, _ = parts
    # Plain values have no scales. The kernel still takes an array for them but does not read it.
    values = (codes if scale else codes.to(x.dtype)).contiguous().numpy()
    scales = scale[0].contiguous().numpy() if scale else values
    k = index.numel()
    chunks = 1 if k <= pool.INLINE else pool.chunks(k)
    task = x.detach().numpy(), index.numpy(), values, scales, weight
    if chunks == 1:
        _subtract(*task, 0, k)
    else:
        pool.each(lambda i: _subtract(*task, k * i // chunks, k * (i + 1) // chunks), chunks)


def _accumulate_entries(
    messages: Sequence[Sequence[Parts]], at: int, k: int, low: int, out: Tensor, weight: float
) -> bool:
    """Add one segment of each message. Return False, with anything added, if a code is damaged."""
    n, count, kept = out.numel(), len(messages), []
    # Addresses of each message's scales, values and code. Numba compiles a kernel per signature:
    # a table of addresses has the same type for any number of messages. Copying the messages with
    # torch.stack instead was never faster and often slower.
    table = np.empty((count, 3), np.int64)
    for row in range(count):
        *scale, codes, code = messages[row][at]
        values, code = (codes if scale else codes.to(out.dtype)).contiguous(), code.contiguous()
        scales = scale[0].contiguous() if scale else values
        table[row] = scales.data_ptr(), values.data_ptr(), code.data_ptr()
        kept.append((scales, values, code))  # the kernels read their memory
    target = out.detach().numpy()
    chunks = 1 if count * k <= pool.INLINE else pool.chunks(count * k)
    # Multiples of 2^low, so that the high part of an index decides its chunk.
    ends = np.arange(chunks + 1) * n // chunks >> low << low
    ends[chunks] = n
    starts, intact = np.zeros((chunks, count, 2), np.int64), np.empty(chunks, np.bool_)
    _, like_values, like_code = kept[0]
    like = like_code.numpy()
    task = table, like, like_values.numpy(), k, low, ends, starts, target, weight, intact
    if chunks == 1:
        _add_up(*task, 0)
    else:
        pool.each(lambda i: _find_starts(table, like, k, low, ends, starts, i), count)
        pool.each(lambda chunk: _add_up(*task, chunk), chunks)
    return bool(intact.all())


@kernel()
def _subtract(x, index, values, scales, weight, start, stop):
    # In the dtype of `x`: a float64 factor would change the rounding compared with plain torch.
    factor = x.dtype.type(-weight)
    for i in range(np.uint64(start), np.uint64(stop)):
        value = value_at(values, scales, i)
        if np.isfinite(value):
            x[np.uint64(index[i])] += factor * value


@kernel()
def _find_starts(table, like, k, low, ends, starts, i):
    """Write where the entries of message `i` start in each chunk: a word and a rank."""
    code = carray(pointer(table[i, 2]), (like.size,), like.dtype)
    word, rank = 0, 0
    for chunk in range(starts.shape[0]):
        word, rank = start_of(code, k, low, ends[chunk], word, rank)
        starts[chunk, i, 0], starts[chunk, i, 1] = word, rank


@kernel()
def _add_up(table, like_code, like_values, k, low, ends, starts, out, weight, intact, chunk):
    """Add the entries of all messages in a chunk of the vector."""
    begin, end, count = ends[chunk], ends[chunk + 1], table.shape[0]
    factor, whole = out.dtype.type(weight), True
    size = max(_BLOCK_BYTES // out.itemsize, _LEAST * out.size // k, 1 << low) >> low << low
    # The words at both ends of a block can have 63 entries of other blocks each.
    index = np.empty(min(size + 126, k), np.int64)
    word, rank, stop = starts[chunk, :, 0], starts[chunk, :, 1], begin
    while stop < end:
        start, stop = stop, min(stop + size, end)
        for i in range(count):
            code = carray(pointer(table[i, 2]), (like_code.size,), like_code.dtype)
            values = carray(pointer(table[i, 1]), (like_values.size,), like_values.dtype)
            scales = carray(pointer(table[i, 0]), (like_values.size,), np.float32)
            first = rank[i]
            found, word[i], rank[i] = decode_below(code, k, low, stop, word[i], first, index)
            decoded = index[: max(found, 0)]
            _add(decoded, start, stop, values, scales, first, out, factor)
            whole = whole and found >= 0 and ascends(decoded)
            if stop == out.size:
                whole = whole and first + found == k and word[i] == last_word(code, k, low)
                whole = whole and padding_is_zero(code, k, low)
                whole = whole and (found == 0 or decoded[found - 1] < stop)
    intact[chunk] = whole


@kernel()
def _add(index, start, stop, values, scale, first, out, weight):
    """Add entries whose index is at least `start` and below `stop`; `first` is the first's rank."""
    i, count = np.uint64(0), np.uint64(index.size)
    while i < count and index[i] < start:
        i += np.uint64(1)
    while i < count:
        at = np.uint64(index[i])
        if at >= np.uint64(stop):
            break
        out[at] += weight * value_at(values, scale, np.uint64(first) + i)
        i += np.uint64(1)
