"""Entries of messages in Numba, for the CPU. The results equal those of plain torch bit for bit.

Messages are added in two passes:

1. Decode the indices of each message and check them.
2. Add the values. This pass goes through the vector in blocks and adds all messages to a block
   while it is in the cache.

Within a block, messages are added in order. The sum of an entry is therefore the same as without
blocks.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]  # it does export carray
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from torchcomp.kernels import pool
from torchcomp.kernels.elias_fano_numba import decode, fits_32_bits
from torchcomp.kernels.numba_jit import kernel
from torchcomp.kernels.quantize_numba import value_at

Array = NDArray[Any]

_BLOCK_BYTES = 1 << 17
"""Size of a block of the vector, chosen to fit into the L2 cache while messages are added."""


def subtract(x: Tensor, index: Tensor, fields: Sequence[Tensor], weight: float) -> None:
    """Compute ``x[index] -= weight * values`` in place, where the values are finite.

    Args:
        x: float32 or float64, contiguous.
        index: 1-D int64, distinct, within bounds.
        fields: the values in the dtype of `x`, or scales and codes.
        weight: factor on the values.
    """
    k, chunks = index.numel(), pool.chunks(index.numel())
    # Plain values have no scales. The kernel still takes an array for them but does not read it.
    values, scales = fields[-1].numpy(), fields[0].numpy()
    task = x.detach().numpy(), index.numpy(), values, scales, weight
    pool.each(lambda i: _subtract(*task, k * i // chunks, k * (i + 1) // chunks), chunks)


def accumulate(
    messages: Sequence[Sequence[Tensor]], k: int, low: int, out: Tensor, weight: float
) -> bool:
    """Add `weight` times each message whose code is intact. Return False if a code is damaged.

    Args:
        messages: for each message its fields, contiguous: values as for :func:`subtract`, then
            the code.
        k: number of entries of each message, 0 < k < n.
        low: width of the low parts of the codes in bits.
        out: float32 or float64, contiguous, of n elements.
        weight: factor on the values.
    """
    n, count = out.numel(), len(messages)
    # Addresses of each message's scales, values and code. Numba compiles a kernel per signature:
    # a table of addresses has the same type for any number of messages.
    addresses = [(m[0].data_ptr(), m[-2].data_ptr(), m[-1].data_ptr()) for m in messages]
    table = np.array(addresses, np.int64)
    code, values = messages[0][-1].numpy(), messages[0][-2].numpy()
    # 32-bit indices halve the memory that the first pass writes and the second pass reads.
    index = np.empty((count, k), np.uint32 if fits_32_bits(n, k, low) else np.int64)
    intact, target = np.empty(count, np.bool_), out.detach().numpy()
    chunks = pool.chunks(count * k)
    # A code decodes serially, so the unit of the first pass is a message. Little work stays in one
    # call.
    tasks = 1 if chunks == 1 else count

    def decode_some(i: int) -> None:
        _decode(table, code, n, low, index, intact, count * i // tasks, count * (i + 1) // tasks)

    def add_up(i: int) -> None:
        ends = n * i // chunks, n * (i + 1) // chunks
        _add_up(index, intact, table, values, target, *ends, weight)

    pool.each(decode_some, tasks)
    pool.each(add_up, chunks)
    return bool(intact.all())


# --- Kernels --------------------------------------------------------------------------------------


def _make_pointer(typing_context: Any, address: Any) -> Any:
    """Convert an address to a pointer, for Numba.

    Copying the messages with torch.stack instead was never faster and often slower.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


_pointer: Any = intrinsic(_make_pointer)


@kernel()
def _subtract(
    x: Array, index: Array, values: Array, scales: Array, weight: float, start: int, stop: int
) -> None:
    # In the dtype of `x`: a float64 factor would change the rounding compared with plain torch.
    factor = x.dtype.type(-weight)
    for i in range(np.uint64(start), np.uint64(stop)):
        value = value_at(values, scales, i)
        if np.isfinite(value):
            x[np.uint64(index[i])] += factor * value


@kernel()
def _decode(
    table: Array,
    like: Array,
    n: int,
    low: int,
    index: Array,
    intact: Array,
    start: int,
    stop: int,
) -> None:
    for i in range(start, stop):
        code = carray(_pointer(table[i, 2]), (like.size,), like.dtype)
        intact[i] = decode(code, n, low, index[i])


@kernel()
def _add_up(
    index: Array,
    intact: Array,
    table: Array,
    like: Array,
    out: Array,
    begin: int,
    end: int,
    weight: float,
) -> None:
    """Add the entries from `begin` to `end` of all messages."""
    count, k = index.shape
    # The next entry of each message. Position k, the end, makes a damaged message add nothing.
    position = np.empty(count, np.int64)
    for i in range(count):
        position[i] = np.searchsorted(index[i], begin) if intact[i] else k
    size, factor = _BLOCK_BYTES // out.itemsize, out.dtype.type(weight)
    for start in range(begin, end, size):
        stop = min(start + size, end)
        for i in range(count):
            values = carray(_pointer(table[i, 1]), (like.size,), like.dtype)
            scales = carray(_pointer(table[i, 0]), (like.size,), np.float32)
            position[i] = _add_below(index[i], position[i], stop, values, scales, out, factor)


@kernel(inline="always")
def _add_below(
    index: Array, position: int, stop: int, values: Array, scale: Array, out: Array, weight: Any
) -> Any:
    """Add entries, starting at `position`, while their index is below `stop`.

    Return the position of the first entry that was not added.
    """
    i = np.uint64(position)
    while i < np.uint64(index.size):
        at = np.uint64(index[i])
        if at >= np.uint64(stop):
            break
        out[at] += weight * value_at(values, scale, i)
        i += np.uint64(1)
    return np.int64(i)
