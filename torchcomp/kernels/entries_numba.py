"""Entries in Numba, for the CPU; gives what plain torch gives, bit for bit.

Messages are added up in two rounds. The first one decodes the indices of each message and checks
them. The second one goes by parts of the vector, each of which takes in all messages before the
next, while it is in the cache. Within a part, message comes after message, in their order, so that
the sum of an entry is what it would be without parts.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import carray, njit, types  # type: ignore[attr-defined]  # it does export carray
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from torchcomp.kernels import pool
from torchcomp.kernels.elias_fano_numba import decode, fits_32_bits
from torchcomp.kernels.quantize_numba import value_at

Array = NDArray[Any]

_BLOCK_BYTES = 1 << 17
"""Of a vector that messages are added to, so that all of them find it in the second cache."""


def subtract(x: Tensor, index: Tensor, fields: Sequence[Tensor], weight: float) -> None:
    """``x[index] -= weight * values``, where values are finite.

    Args:
        x: float32 or float64, contiguous.
        index: 1-D int64, without repeats, within bounds.
        fields: the values in the dtype of `x`, or scales and codes.
        weight: factor on the values.
    """
    k, chunks = index.numel(), pool.chunks(index.numel())
    # Values that have no scales bring themselves, which are not read.
    values, scales = fields[-1].numpy(), fields[0].numpy()
    task = x.detach().numpy(), index.numpy(), values, scales, weight
    pool.each(lambda i: _subtract(*task, k * i // chunks, k * (i + 1) // chunks), chunks)


def accumulate(
    messages: Sequence[Sequence[Tensor]], k: int, low: int, out: Tensor, weight: float
) -> bool:
    """Add `weight` times each message whose code is intact; False if some are not.

    Args:
        messages: of each its fields, contiguous: values as for :func:`subtract`, then the code.
        k: number of entries of each, 0 < k < n.
        low: width of the low parts of the codes.
        out: float32 or float64, contiguous, of n elements.
        weight: factor on the values.
    """
    n, count = out.numel(), len(messages)
    # For each message, where its scales, its values and its code are: one call takes any number.
    places = [(m[0].data_ptr(), m[-2].data_ptr(), m[-1].data_ptr()) for m in messages]
    table = np.array(places, np.int64)
    code, values = messages[0][-1].numpy(), messages[0][-2].numpy()
    index = np.empty((count, k), np.uint32 if fits_32_bits(n, k, low) else np.int64)
    intact, target = np.empty(count, np.bool_), out.detach().numpy()
    chunks = pool.chunks(count * k)
    turns = 1 if chunks == 1 else count

    def decode_some(i: int) -> None:
        _decode(table, code, n, low, index, intact, count * i // turns, count * (i + 1) // turns)

    def add_up(i: int) -> None:
        ends = n * i // chunks, n * (i + 1) // chunks
        _add_up(index, intact, table, values, target, *ends, weight)

    pool.each(decode_some, turns)
    pool.each(add_up, chunks)
    return bool(intact.all())


# --- Kernels --------------------------------------------------------------------------------------


def _make_pointer(typing_context: Any, address: Any) -> Any:
    """An address as a pointer: torch.stack of the messages instead was no faster, often slower."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


_pointer: Any = intrinsic(_make_pointer)


@njit(nogil=True, cache=True)
def _subtract(
    x: Array, index: Array, values: Array, scales: Array, weight: float, start: int, stop: int
) -> None:
    factor = x.dtype.type(-weight)
    for i in range(np.uint64(start), np.uint64(stop)):
        value = value_at(values, scales, i)
        if np.isfinite(value):
            x[np.uint64(index[i])] += factor * value


@njit(nogil=True, cache=True)
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


@njit(nogil=True, cache=True)
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
    place = np.empty(count, np.int64)
    for i in range(count):
        place[i] = np.searchsorted(index[i], begin) if intact[i] else k
    size, factor = _BLOCK_BYTES // out.itemsize, out.dtype.type(weight)
    for start in range(begin, end, size):
        stop = min(start + size, end)
        for i in range(count):
            values = carray(_pointer(table[i, 1]), (like.size,), like.dtype)
            scales = carray(_pointer(table[i, 0]), (like.size,), np.float32)
            place[i] = _add_below(index[i], place[i], stop, values, scales, out, factor)


@njit(nogil=True, cache=True, inline="always")
def _add_below(
    index: Array, place: int, stop: int, values: Array, scale: Array, out: Array, weight: Any
) -> Any:
    """Add the entries from one place on while their index is below `stop`; returns the next."""
    i = np.uint64(place)
    while i < np.uint64(index.size):
        at = np.uint64(index[i])
        if at >= np.uint64(stop):
            break
        out[at] += weight * value_at(values, scale, i)
        i += np.uint64(1)
    return np.int64(i)
