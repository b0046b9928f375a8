"""Bits of a word, for Numba's kernels, in one instruction each.

Numba looks for changes in a kernel's own file alone: after a change here, its cached kernels
(``__pycache__``) are out of date until they are deleted.
"""

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def _count_trailing_zeros(typing_context: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], cgutils.false_bit)

    return types.int64(types.uint64), generate


trailing_zeros: Any = intrinsic(_count_trailing_zeros)
"""Zeros below the lowest set bit of a 64-bit word; 64 for 0."""


def _count_ones(typing_context: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), generate


ones: Any = intrinsic(_count_ones)
"""Number of set bits of a 64-bit word."""
