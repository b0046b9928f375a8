"""Elias-Fano in Numba, for the CPU; gives what :mod:`.elias_fano_torch` gives, bit for bit.

Serial, and without the GIL: the threads that call it are the parallelism. Both parts are held as
64-bit words, of which decoding takes the set bits one by one, lowest first.
"""

from typing import Any

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

Array = NDArray[Any]


def encode(index: Array, n: int, low: int, out: Array) -> bool:
    """Write the code of 0 < k < n indices into `out`; False if they do not ascend within [0, n)."""
    cut = (index.size * low + 7) // 8
    lows, highs = _zeros(cut), _zeros(out.size - cut)
    if not _encode(index, n, low, lows, highs):
        return False
    out[:cut] = lows.view(np.uint8)[:cut]
    out[cut:] = highs.view(np.uint8)[: out.size - cut]
    return True


def decode(raw: Array, n: int, low: int, index: Array) -> bool:
    """Write the indices into `index`, int64 of k elements; 0, 1, 2, ... and False if not intact."""
    return bool(_decode(*_split(raw, index.size, low), n, low, index))


def add(index: Array, values: Array, out: Array, weight: float) -> None:
    """``out[index] += weight * values``, of one dtype; every index must be within bounds."""
    # Unsigned, since Numba asks of every signed index whether it counts from the end.
    _add(index.view(np.uint64), values, out, out.dtype.type(weight))


def _split(raw: Array, k: int, low: int) -> tuple[Array, Array]:
    cut = (k * low + 7) // 8
    lows, highs = _zeros(cut), _zeros(raw.size - cut)
    lows.view(np.uint8)[:cut] = raw[:cut]
    highs.view(np.uint8)[: raw.size - cut] = raw[cut:]
    return lows, highs


def _zeros(nbytes: int) -> Array:
    """Words for so many bytes, and one more, so that two may be read where one begins."""
    return np.zeros(nbytes // 8 + 2, np.uint64)


def _count_trailing_zeros(typing_context: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], cgutils.true_bit)

    return types.int64(types.uint64), generate


_trailing_zeros: Any = intrinsic(_count_trailing_zeros)
"""Zeros below the lowest set bit of a 64-bit word, in one instruction; undefined for 0."""


@njit(nogil=True, cache=True)
def _encode(index: Array, n: int, low: int, lows: Array, highs: Array) -> bool:
    last, step = -1, 1 if low else 0
    mask = (1 << low) - 1
    for i in range(index.size):
        x = index[i]
        if x <= last or x >= n:
            return False
        last = x
        at = (x >> low) + i * step
        highs[at >> 6] |= np.uint64(1) << np.uint64(at & 63)
        if low:
            _put(lows, i * low, low, np.uint64(x & mask))
    return True


@njit(nogil=True, cache=True, inline="always")
def _put(words: Array, at: int, low: int, value: Any) -> None:
    word, shift = at >> 6, at & 63
    words[word] |= value << np.uint64(shift)
    if shift + low > 64:
        words[word + 1] |= value >> np.uint64(64 - shift)


@njit(nogil=True, cache=True, inline="always")
def _get(words: Array, at: int) -> Any:
    """The 64 bits from `at` on."""
    word, shift = at >> 6, np.uint64(at & 63)
    # In two steps, as a shift by 64 means nothing.
    above = (words[word + 1] << np.uint64(1)) << (np.uint64(63) - shift)
    return (words[word] >> shift) | above


@njit(nogil=True, cache=True)
def _decode(lows: Array, highs: Array, n: int, low: int, index: Array) -> bool:
    k, i, last, step = index.size, 0, -1, 1 if low else 0
    mask = (np.uint64(1) << np.uint64(low)) - np.uint64(1)
    intact = _get(lows, k * low) == 0
    for word in range(highs.size):
        bits = highs[word]
        while bits and intact:
            at = 64 * word + _trailing_zeros(bits) - i * step
            bits &= bits - np.uint64(1)
            x = (at << low) | np.int64(_get(lows, i * low) & mask)
            intact = last < x < n and i < k
            if intact:
                index[i] = x
            last = x
            i += 1
    if not intact or i != k:
        index[:] = np.arange(k)
        return False
    return True


@njit(nogil=True, cache=True)
def _add(index: Array, values: Array, out: Array, weight: Any) -> None:
    for i in range(index.size):
        out[index[i]] += weight * values[i]
