"""Elias-Fano coding in Numba, for the CPU. The results equal those of plain torch bit for bit."""

from typing import Any

import numpy as np
from numba.cpython.unsafe import numbers

from torchcomp.kernels.numba_jit import kernel

trailing_zeros: Any = numbers.trailing_zeros
"""Zeros below the lowest set bit of a word."""


@kernel()
def ascends(index):
    """Return whether each element is larger than the one before."""
    lower, upper = index[:-1], index[1:]
    wrong = 0
    for i in range(lower.size):  # no early exit, so LLVM can vectorize the loop
        wrong += lower[i] >= upper[i]
    return wrong == 0


@kernel()
def encode(index, n, low, out):
    """Write the code of 0 < k < n indices to `out`; False if they do not ascend within [0, n)."""
    k, step = np.uint64(index.size), np.uint64(low > 0)
    if index[0] < 0 or index[index.size - 1] >= n or not ascends(index):
        return False
    cut, width = (index.size * low + 7) >> 3, np.uint64(low)
    mask = (np.uint64(1) << width) - np.uint64(1)
    byte, word, filled = np.uint64(0), np.uint64(0), np.uint64(0)
    for i in range(k if low else np.uint64(0)):
        word |= (np.uint64(index[i]) & mask) << filled
        filled += width
        while filled >= np.uint64(8):
            out[byte] = word & np.uint64(255)
            word, filled, byte = word >> np.uint64(8), filled - np.uint64(8), byte + np.uint64(1)
    if filled:
        out[byte] = word
    high = out[cut:]
    high[:] = 0
    for i in range(k):
        bit = (np.uint64(index[i]) >> width) + i * step
        high[bit >> np.uint64(3)] |= np.uint8(1) << np.uint8(bit & np.uint64(7))
    return True


# LLVM compiles the loop over 8 bytes, and `ones`, to one instruction. It does so for the loop only
# if no index can be negative. This is why the indices below are np.uint64.


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
def ones(word):
    """Return the number of set bits."""
    # Add neighbouring counts of 1, 2 and 4 bits in place. The product sums the 8 bytes.
    word -= (word >> np.uint64(1)) & np.uint64(0x5555555555555555)
    pairs = np.uint64(0x3333333333333333)
    word = (word & pairs) + ((word >> np.uint64(2)) & pairs)
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@kernel()
def decode(raw, n, low, index):
    """Write the 0 < k < n indices of a code to `index`, and return whether the code is intact."""
    k, count = index.size, 0
    bits = k * low
    cut, width = (bits + 7) >> 3, np.uint64(low)
    for first in range(cut, raw.size, 8):
        word, base = _word_at(raw, first), 8 * (first - cut)
        before, count = count, count + ones(word)
        if count > k:  # of a damaged code
            return False
        for i in range(np.uint64(before), np.uint64(count)):
            index[i] = base + np.int64(trailing_zeros(word))
            word &= word - np.uint64(1)
    if count < k or (bits & 7 and raw[cut - 1] >> (bits & 7)):
        return False
    if low:
        # Bit (x_i div 2^l) + i is set for entry i, so x_i = ((position - i) << l) | low part.
        mask = (np.uint64(1) << width) - np.uint64(1)
        for i in range(np.uint64(k)):
            bit = i * width
            part = (_word_at(raw, np.int64(bit >> np.uint64(3))) >> (bit & np.uint64(7))) & mask
            index[i] = (np.uint64(index[i]) - i) << width | part
    return index[k - 1] < n and ascends(index)
