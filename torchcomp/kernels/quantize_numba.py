"""Block quantisation in Numba, for the CPU; gives what plain torch gives, bit for bit.

Serial, and without the GIL. The largest magnitude of a block is found among the bits of its values,
which order as the magnitudes do, with NaN above infinity: so LLVM may vectorise the search.
"""

from typing import Any

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload
from numpy.typing import NDArray
from torch import Tensor

from torchcomp.kernels.quantize import BLOCK, largest_scale

Array = NDArray[Any]

_SMALLEST = np.finfo(np.float32).tiny
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)


def encode(
    values: Tensor, levels: int, uniform: Array | None, index: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Scales and codes of `values`; with an `index`, of those float32 values that it chooses."""
    x = values.detach().float().numpy()
    at = None if index is None else index.numpy()
    count = (x if at is None else at).size
    scale = torch.empty(-(-count // BLOCK))
    if levels == 7:
        codes = torch.empty((count + 1) // 2, dtype=torch.uint8)
    else:
        codes = torch.empty(count, dtype=torch.int8)
    _encode(x, at, levels, largest_scale(levels), uniform, scale.numpy(), codes.numpy())
    return scale, codes


def decode(scale: Tensor, codes: Tensor, count: int) -> Tensor:
    """Code times scale, in float32; codes as :func:`encode` made them."""
    out = torch.empty(count)
    _decode(scale.numpy(), codes.numpy(), out.numpy())
    return out


@njit(nogil=True, cache=True, error_model="numpy")
def _encode(
    x: Array, index: Any, levels: int, cap: float, uniform: Any, scales: Array, codes: Array
) -> None:
    count = x.size if index is None else index.size
    block, singles = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.int8)
    for number in range(scales.size):
        start, stop = number * BLOCK, min((number + 1) * BLOCK, count)
        part = x[start:stop] if index is None else _gather(x, index[start:stop], block)
        scales[number] = step = _scale(part, np.float32(levels), np.float32(cap))
        # A pair's codes are put together afterwards; an odd last one is paired with zero.
        singles[part.size & ~1 :] = 0
        line = singles if levels == 7 else codes[start:stop].view(np.int8)
        if not step > 0.0:
            line[: part.size] = 0
        elif uniform is None:
            _to_nearest(part, step, line)
        else:
            _at_random(part, step, np.float32(levels), uniform[start:stop], line)
        if levels == 7:
            _store_pairs(singles, codes[start >> 1 : (stop + 1) >> 1])


@njit(nogil=True, cache=True)
def _gather(x: Array, index: Array, block: Array) -> Array:
    for i in range(index.size):
        block[i] = x[np.uint64(index[i])]
    return block[: index.size]


@njit(nogil=True, cache=True, error_model="numpy")
def _scale(values: Array, levels: Any, cap: Any) -> Any:
    bits = values.view(np.uint32)
    largest = np.uint32(0)
    for i in range(bits.size):
        largest = max(largest, np.uint32(bits[i] & _MAGNITUDE))
    if largest >= _INFINITY:
        return np.float32(np.nan)
    scale = min(np.uint32(largest).view(np.float32) / levels, cap)
    return scale if scale >= _SMALLEST else np.float32(0.0)


@njit(nogil=True, cache=True, error_model="numpy")
def _to_nearest(values: Array, step: Any, line: Array) -> None:
    # No quotient is further beyond the last level than a rounding error, so none needs a limit.
    for i in range(values.size):
        line[i] = np.int8(np.rint(values[i] / step))


@njit(nogil=True, cache=True, error_model="numpy")
def _at_random(values: Array, step: Any, levels: Any, uniform: Array, line: Array) -> None:
    for i in range(values.size):
        quotient = min(max(values[i] / step, -levels), levels)
        lower = np.floor(quotient)
        line[i] = np.int8(lower) + (uniform[i] < quotient - lower)


@njit(nogil=True, cache=True)
def _store_pairs(line: Array, codes: Array) -> None:
    for i in range(codes.size):
        codes[i] = (line[2 * i] & 15) | ((line[2 * i + 1] & 15) << 4)


def value_at(values: Any, scale: Any, i: Any) -> Any:
    """For Numba: a value of a message; in float32 if it travels as a code, otherwise as it is.

    Args:
        values: int8 codes, uint8 pairs of codes, or float values.
        scale: of each block, for codes.
        i: which value.
    """
    raise NotImplementedError


@overload(value_at, inline="always")
def _choose_value(values: Any, scale: Any, i: Any) -> Any:
    def single(values: Any, scale: Any, i: Any) -> Any:
        return np.float32(values[i]) * scale[np.uint64(i) // np.uint64(BLOCK)]

    def of_a_pair(values: Any, scale: Any, i: Any) -> Any:
        place = np.uint64(i)
        nibble = (np.int32(values[place >> np.uint64(1)]) >> (4 * (i & 1))) & 15
        return np.float32((nibble ^ 8) - 8) * scale[np.uint64(i) // np.uint64(BLOCK)]

    def plain(values: Any, scale: Any, i: Any) -> Any:
        return values[i]

    return {types.int8: single, types.uint8: of_a_pair}.get(values.dtype, plain)


@njit(nogil=True, cache=True)
def _decode(scale: Array, codes: Array, out: Array) -> None:
    for i in range(out.size):
        out[i] = value_at(codes, scale, i)
