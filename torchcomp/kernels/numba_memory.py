"""Memory as Numba's kernels see it: arrays by their address, and words that begin at any byte.

Numba looks for changes in a kernel's own file alone: after a change here, its cached kernels
(``__pycache__``) are out of date until they are deleted.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types  # type: ignore[attr-defined]  # it does export carray
from numba.extending import intrinsic
from numpy.typing import NDArray

Array = NDArray[Any]

BYTES = np.empty(0, np.uint8)
LONGS = np.empty(0, np.int64)
SINGLES = np.empty(0, np.float32)
DOUBLES = np.empty(0, np.float64)
"""What :func:`array_at` takes for `like`."""


def _make_pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


_pointer: Any = intrinsic(_make_pointer)


@njit(nogil=True, cache=True, inline="always")
def array_at(address: int, size: int, like: Array) -> Any:
    """For Numba: the 1-D array of the dtype of `like` that begins at an address.

    To hand a kernel the address of a tensor costs a tenth of what a NumPy view of it costs, and one
    compiled kernel takes any number of them.
    """
    return carray(_pointer(address), (size,), like.dtype)


def _load_word(typing_context: Any, raw: Any, at: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(raw)(context, builder, args[0]).data
        place = builder.gep(data, [args[1]])
        loaded = builder.load(builder.bitcast(place, ir.IntType(64).as_pointer()))
        loaded.align = 1
        return loaded

    return types.uint64(raw, types.int64), generate


whole_word_at: Any = intrinsic(_load_word)
"""The 64-bit word at a byte of a contiguous uint8 array, which must hold all eight of its bytes."""


def _store_word(typing_context: Any, out: Any, at: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(out)(context, builder, args[0]).data
        place = builder.gep(data, [args[1]])
        stored = builder.store(args[2], builder.bitcast(place, ir.IntType(64).as_pointer()))
        stored.align = 1
        return context.get_dummy_value()

    return types.none(out, types.int64, types.uint64), generate


put_word: Any = intrinsic(_store_word)
"""Write a 64-bit word at a byte of a contiguous uint8 array, which must hold all of it."""


@njit(nogil=True, cache=True, inline="always")
def word_at(raw: Array, byte: int) -> Any:
    """For Numba: the 64 bits from a byte on, with zeros beyond the end."""
    if byte + 8 <= raw.size:
        return whole_word_at(raw, byte)
    word = np.uint64(0)
    for i in range(raw.size - byte):
        word |= np.uint64(raw[byte + i]) << np.uint64(8 * i)
    return word
