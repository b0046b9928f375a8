"""Entries of messages in Numba, for the CPU. The results equal those of plain torch bit for bit.

Messages are added block by block of the vector. In each block, for each message, the indices are
decoded and checked and the values added, while the block and the indices are in the cache. Several
threads take a chunk of the vector each. A first look at the codes finds where each chunk starts.

Within a block, messages are added in order. The sum of an entry is therefore the same as without
blocks.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]  # it does export carray
from numpy.typing import NDArray
from torch import Tensor

from torchcomp.kernels import pool
from torchcomp.kernels.elias_fano_numba import (
    ascends,
    decode_below,
    last_word,
    padding_is_zero,
    start_of,
)
from torchcomp.kernels.numba_jit import kernel, pointer
from torchcomp.kernels.quantize_numba import value_at
from torchcomp.routes.wire import Parts

Array = NDArray[Any]

_BLOCK_BYTES = 1 << 17
"""Size of a block of the vector, chosen to fit into the L2 cache while messages are added."""

_LEAST = 1 << 9
"""Blocks are larger if a message would have fewer entries in them, on average."""


def subtract(x: Tensor, index: Tensor, parts: Parts, weight: float) -> None:
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


def accumulate(
    messages: Sequence[Sequence[Parts]], at: int, k: int, low: int, out: Tensor, weight: float
) -> bool:
    """Add `weight` times one segment of each message. Return False if a code is damaged.

    Then any entries can have been added.
    """
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


# --- Kernels --------------------------------------------------------------------------------------


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
