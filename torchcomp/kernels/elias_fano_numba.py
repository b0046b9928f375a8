"""Elias-Fano coding in Numba, for the CPU. The results equal those of plain torch bit for bit.

Decoding can start at any word of the high part, so that parts of a code are decoded in parallel. It
writes the positions of the set bits, turns them into indices with the low parts, and checks that
they ascend. Each step is a short loop, of which the processor overlaps several iterations.
"""

from typing import Any

import numpy as np
from numba.cpython.unsafe import numbers
from numpy.typing import NDArray
from torch import Tensor

from torchcomp.kernels import pool
from torchcomp.kernels.numba_jit import kernel

Array = NDArray[Any]

trailing_zeros: Any = numbers.trailing_zeros
"""Zeros below the lowest set bit of a word."""


def encode(index: Tensor, n: int, low: int, out: Tensor) -> bool:
    """Write the code of 0 < k < n indices to `out`; False if they do not ascend within [0, n)."""
    chunks = 1 if index.numel() <= pool.INLINE else pool.chunks(index.numel())
    ascending = np.empty(chunks, np.bool_)
    task = index.numpy(), n, low, out.numpy(), ascending
    if chunks == 1:
        _encode(*task, 0)
    else:
        pool.each(lambda chunk: _encode(*task, chunk), chunks)
    return bool(ascending.all())


# LLVM compiles each loop over 8 bytes, and `ones`, to one instruction. For the loops it does so
# only if no index can be negative. This is why the indices below are np.uint64.


@kernel(inline="always")
def _word_at(raw, byte):
    """Read 64 bits starting at a byte, with zeros beyond the end."""
    at, word = np.uint64(byte), np.uint64(0)
    if byte + 8 <= raw.size:
        for i in range(np.uint64(8)):
            word |= np.uint64(raw[at + i]) << (i << np.uint64(3))
        return word
    for i in range(raw.size - byte):
        word |= np.uint64(raw[byte + i]) << np.uint64(8 * i)
    return word


@kernel(inline="always")
def _put_word(out, byte, word):
    """Write 64 bits starting at a byte."""
    at = np.uint64(byte)
    for i in range(np.uint64(8)):
        out[at + i] = (word >> (i << np.uint64(3))) & np.uint64(255)


@kernel(inline="always")
def ones(word):
    """Return the number of set bits."""
    # Add neighbouring counts of 1, 2 and 4 bits in place. The product sums the 8 bytes.
    word -= (word >> np.uint64(1)) & np.uint64(0x5555555555555555)
    pairs = np.uint64(0x3333333333333333)
    word = (word & pairs) + ((word >> np.uint64(2)) & pairs)
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@kernel()
def ascends(index):
    """Return whether each element is larger than the one before."""
    lower, upper = index[:-1], index[1:]
    wrong = 0
    for i in range(lower.size):  # no early exit, so LLVM can vectorize the loop
        wrong += lower[i] >= upper[i]
    return wrong == 0


@kernel()
def _encode(index, n, low, out, ascending, chunk):
    """Write one of ``ascending.size`` parts of the code, and check as many indices."""
    # No two parts have a byte in common, so threads need no locks.
    k, chunks = index.size, ascending.size
    # Start at a multiple of 64 entries: 64 low parts of any width end at a whole byte.
    start, stop = (k * chunk // chunks) & ~63, (k * (chunk + 1) // chunks) & ~63
    if chunk == chunks - 1:
        stop = k
    within = index[0] >= 0 and index[k - 1] < n
    ascending[chunk] = within and ascends(index[max(start - 1, 0) : stop])
    _encode_entries(index, low, out, start, stop)
    words = (k + (n >> low)) // 64 + 2 if low else (n + 63) // 64
    _encode_words(index, low, out, words * chunk // chunks, words * (chunk + 1) // chunks)


@kernel()
def _encode_entries(chosen, low, out, start, stop):
    """Write the low parts of entries `start` to `stop`; `start` is a multiple of 64."""
    mask = (np.uint64(1) << np.uint64(low)) - np.uint64(1)
    byte, word, filled = (start * low) >> 3, np.uint64(0), 0
    for i in range(np.uint64(start), np.uint64(stop if low else start)):
        part = np.uint64(chosen[i]) & mask
        word |= part << np.uint64(filled)
        filled += low
        if filled >= 64:
            _put_word(out, byte, word)
            byte += 8
            filled -= 64
            # The part's high bits that did not fit into the word just written.
            word = part >> np.uint64(low - filled)
    while filled > 0:
        out[byte] = word & np.uint64(255)
        word >>= np.uint64(8)
        byte += 1
        filled -= 8


@kernel()
def _encode_words(chosen, low, out, start, stop):
    """Write words `start` to `stop` of the high part, as far as they exist."""
    k, nbytes = chosen.size, out.size
    cut, step = (k * low + 7) >> 3, 1 if low else 0
    # Binary search for the first entry whose bit is in these words.
    rank, end = 0, k
    while rank < end:
        middle = (rank + end) >> 1
        if (chosen[middle] >> low) + middle * step < 64 * start:
            rank = middle + 1
        else:
            end = middle
    for first in range(cut + 8 * start, min(cut + 8 * stop, nbytes), 8):
        word, base = np.uint64(0), 8 * (first - cut)
        while rank < k:
            at = (chosen[np.uint64(rank)] >> low) + rank * step - base
            if at >= 64:
                break
            word |= np.uint64(1) << np.uint64(at & 63)
            rank += 1
        if first + 8 <= nbytes:
            _put_word(out, first, word)
        else:
            for i in range(nbytes - first):
                out[first + i] = (word >> np.uint64(8 * i)) & np.uint64(255)


@kernel()
def last_word(raw, k, low):
    """Return the number of the high part's last 64-bit word, counted from 0."""
    return (raw.size - ((k * low + 7) >> 3) - 1) >> 3


@kernel()
def padding_is_zero(raw, k, low):
    """Return whether the low part's last byte is padded with zeros."""
    bits = k * low
    return bits & 7 == 0 or raw[bits >> 3] >> (bits & 7) == 0


@kernel()
def start_of(raw, k, low, begin, word, rank):
    """Find where to start decoding the entries whose index is at least `begin`."""
    cut, step, last = (k * low + 7) >> 3, 1 if low else 0, last_word(raw, k, low)
    while word < last:
        after = rank + ones(_word_at(raw, cut + 8 * word))
        # Before a bit, there are as many zeros as its high part. A bitmap has no high parts.
        if (64 * (word + 1) - after * step) << low >= begin:
            break
        word, rank = word + 1, after
    return word, rank


@kernel()
def decode_below(raw, k, low, end, word, rank, index):
    """Decode the entries whose index is below `end`, and all others of the last word with any."""
    cut, step, last = (k * low + 7) >> 3, 1 if low else 0, last_word(raw, k, low)
    count, before, room = 0, 0, min(index.size, k - rank)
    while word <= last and (64 * word - (rank + count) * step) << low < end:
        bits, base = _word_at(raw, cut + 8 * word), 64 * word
        before, after = count, count + ones(bits)
        # A damaged code can have more set bits than entries.
        if after > room:
            return -1, word, rank
        for i in range(count, after):
            index[np.uint64(i)] = base + np.int64(trailing_zeros(bits))
            bits &= bits - np.uint64(1)
        word, count = word + 1, after
    if low:
        _add_low_parts(raw, low, rank, index[:count])
    return count, word - 1, rank + before


@kernel()
def _add_low_parts(raw, low, first, index):
    """Turn the positions of bits in the high part into indices. `first` is the first one's rank."""
    # Bit (x_i div 2^l) + i is set for entry i, so x_i = ((position - i) << l) | low part.
    mask = (np.uint64(1) << np.uint64(low)) - np.uint64(1)
    for rank in range(index.size):
        i, bit = np.uint64(rank), (first + rank) * low
        part = (_word_at(raw, bit >> 3) >> np.uint64(bit & 7)) & mask
        index[i] = (np.uint64(index[i]) - np.uint64(first) - i) << np.uint64(low) | part
