"""Entries in Numba, for the CPU; gives what plain torch gives, bit for bit.

Messages are added up in two rounds. The first one surveys the code of each message, all that there
is to check included. The second one goes by parts of the vector, each of which takes in all
messages before the next, while it is in the cache; the survey says where in a message a part
begins. Within a part, message comes after message, in their order, so that the sum of an entry is
what it would be without parts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from torchcomp.kernels import pool
from torchcomp.kernels.elias_fano_numba import INLINE, decode_any, fits_32_bits
from torchcomp.kernels.numba_memory import BYTES, DOUBLES, LONGS, SINGLES, array_at
from torchcomp.kernels.quantize_numba import value_at

Array = NDArray[Any]

_BLOCK_BYTES = 1 << 17
"""Of a vector that messages are added to, so that all of them find it in the second cache."""

_LIKE: dict[torch.dtype, Array] = {
    torch.int8: np.empty(0, np.int8),
    torch.uint8: BYTES,
    torch.float32: SINGLES,
    torch.float64: DOUBLES,
}
_WORDS = (LONGS, np.empty(0, np.uint32))


def take(x: Tensor, index: Tensor) -> Tensor:
    """``x[index]``, both contiguous, `x` float32 or float64; IndexError if out of bounds."""
    out, like = torch.empty(index.numel(), dtype=x.dtype), _LIKE[x.dtype]
    ends = x.data_ptr(), x.numel(), index.data_ptr(), out.data_ptr()
    _in_chunks(lambda start, stop: _take(*ends, like, start, stop), index.numel())
    return out


def add(index: Tensor, fields: Sequence[Tensor], out: Tensor, weight: float) -> None:
    """``out[index] += weight * values``; IndexError if it is out of bounds.

    Args:
        index: 1-D int64, contiguous, without repeats.
        fields: contiguous; the values in the dtype of `out`, or scales and codes.
        out: float32 or float64, contiguous.
        weight: factor on the values.
    """
    to = out.data_ptr(), out.numel(), _LIKE[out.dtype]
    # A scale that is not there is not read.
    values = fields[0].data_ptr(), fields[-1].data_ptr(), _LIKE[fields[-1].dtype]
    k, at = index.numel(), index.data_ptr()
    _in_chunks(lambda start, stop: _add(*to, *values, at, k, start, stop, weight), k)


def _in_chunks(work: Callable[[int, int], bool], count: int) -> None:
    """Call ``work(start, stop)`` for parts of so many entries; False stands for an IndexError."""
    if count <= INLINE:
        inside = work(0, count)
    else:
        chunks = pool.chunks()
        found = np.empty(chunks, np.bool_)

        def run(chunk: int) -> None:
            found[chunk] = work(count * chunk // chunks, count * (chunk + 1) // chunks)

        pool.each(run, chunks)
        inside = bool(found.all())
    if not inside:
        raise IndexError("an index is out of the vector's bounds")


def accumulate(
    messages: Sequence[Sequence[Tensor]], k: int, low: int, out: Tensor, weight: float
) -> bool:
    """Add `weight` times each message whose code is intact; False if some are not.

    Args:
        messages: of each its fields, contiguous: values as for :func:`add`, then the code.
        k: number of entries of each, 0 < k < n.
        low: width of the low parts of the codes.
        out: float32 or float64, contiguous, of n elements.
        weight: factor on the values.
    """
    n, count, nbytes = out.numel(), len(messages), messages[0][-1].numel()
    # For each message, where its scales, its values and its code are.
    table = np.array([[m[i].data_ptr() for i in (0, -2, -1)] for m in messages], np.int64)
    likes = _LIKE[messages[0][-2].dtype], _LIKE[out.dtype]
    word, target = _WORDS[fits_32_bits(n, k, low)], out.data_ptr()
    if count * k <= INLINE:
        return bool(_accumulate(table, *likes, word, nbytes, n, k, low, target, weight))
    index, intact = np.empty((count, k), word.dtype), np.empty(count, np.bool_)
    chunks = pool.chunks()
    ends = [n * chunk // chunks for chunk in range(chunks + 1)]

    def decode(i: int) -> None:
        intact[i] = _decode(table[i, 2], nbytes, n, low, index[i])

    def add_up(chunk: int) -> None:
        _add_up(index, intact, table, *likes, target, n, ends[chunk], ends[chunk + 1], weight)

    pool.each(decode, count)
    pool.each(add_up, chunks)
    return bool(intact.all())


# --- Kernels --------------------------------------------------------------------------------------


@njit(nogil=True, cache=True)
def _take(x: int, n: int, index: int, out: int, like: Array, start: int, stop: int) -> bool:
    source, at = array_at(x, n, like), array_at(index, stop, LONGS)
    target = array_at(out, stop, like)
    for i in range(start, stop):
        if np.uint64(at[i]) >= np.uint64(n):
            return False
        target[i] = source[np.uint64(at[i])]
    return True


@njit(nogil=True, cache=True)
def _add(
    out: int,
    n: int,
    like_out: Array,
    scale: int,
    values: int,
    like: Array,
    index: int,
    k: int,
    start: int,
    stop: int,
    weight: float,
) -> bool:
    at, target = array_at(index, k, LONGS), array_at(out, n, like_out)
    sent, scales = array_at(values, k, like), array_at(scale, k, SINGLES)
    factor = like_out.dtype.type(weight)
    for i in range(np.uint64(start), np.uint64(stop)):
        place = np.uint64(at[i])
        if place >= np.uint64(n):
            return False
        target[place] += factor * value_at(sent, scales, i)
    return True


@njit(nogil=True, cache=True)
def _accumulate(
    table: Array,
    like: Array,
    like_out: Array,
    word: Array,
    nbytes: int,
    n: int,
    k: int,
    low: int,
    out: int,
    weight: float,
) -> bool:
    index = np.empty((table.shape[0], k), word.dtype)
    intact = np.empty(table.shape[0], np.bool_)
    for i in range(table.shape[0]):
        intact[i] = _decode(table[i, 2], nbytes, n, low, index[i])
    _add_up(index, intact, table, like, like_out, out, n, 0, n, weight)
    return bool(intact.all())


@njit(nogil=True, cache=True)
def _decode(code: int, nbytes: int, n: int, low: int, index: Array) -> bool:
    return decode_any(array_at(code, nbytes, BYTES), n, low, index)


@njit(nogil=True, cache=True)
def _add_up(
    index: Array,
    intact: Array,
    table: Array,
    like: Array,
    like_out: Array,
    out: int,
    n: int,
    begin: int,
    end: int,
    weight: float,
) -> None:
    """Add the entries from `begin` to `end` of all messages."""
    count, k = index.shape
    place = np.empty(count, np.int64)
    for i in range(count):
        place[i] = np.searchsorted(index[i], begin) if intact[i] else k
    target, size = array_at(out, n, like_out), _BLOCK_BYTES // like_out.itemsize
    factor = like_out.dtype.type(weight)
    for start in range(begin, end, size):
        stop = min(start + size, end)
        for i in range(count):
            values = array_at(table[i, 1], k, like)
            scale = array_at(table[i, 0], k, SINGLES)
            place[i] = _add_below(index[i], place[i], stop, values, scale, target, factor)


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
