"""Block quantisation in Numba, for the CPU; gives what :mod:`.quantize_torch` gives, bit for bit.

Serial, and without the GIL. The largest magnitude of a block is found among the bits of its values,
which order as the magnitudes do, with NaN above infinity: so LLVM may vectorise the search.
"""

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload
from numpy.typing import NDArray
from torch import Tensor

from torchcomp.kernels.numba_memory import DOUBLES, LONGS, SINGLES, array_at
from torchcomp.kernels.quantize_torch import BLOCK, largest_scale

Array = NDArray[Any]

_SMALLEST = np.finfo(np.float32).tiny
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)

_LIKE: dict[torch.dtype, Array] = {torch.float32: SINGLES, torch.float64: DOUBLES}
_CODES = np.empty(0, np.int8)


def encode(
    values: Tensor, levels: int, uniform: Array | None, index: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As :func:`torchcomp.kernels.quantize_torch.encode`, on the CPU, of ``values[index]``."""
    by_address = index is None or (index.dtype == torch.int64 and index.is_contiguous())
    if values.dtype not in _LIKE or not by_address:
        values, index = (values if index is None else values[index]).float(), None
    values = values.contiguous()
    count = values.numel() if index is None else index.numel()
    scale = torch.empty(-(-count // BLOCK))
    codes = torch.empty(
        (count + 1) // 2 if levels == 7 else count, dtype=torch.uint8 if levels == 7 else torch.int8
    )
    inside = _encode(
        values.data_ptr(),
        values.numel(),
        _LIKE[values.dtype],
        0 if index is None else index.data_ptr(),
        count,
        levels,
        largest_scale(levels),
        0 if uniform is None else uniform.ctypes.data,
        scale.data_ptr(),
        codes.data_ptr(),
    )
    if not inside:
        raise IndexError("an index is out of the vector's bounds")
    return scale, codes


def decode(scale: Tensor, codes: Tensor, count: int) -> Tensor:
    """As :func:`torchcomp.kernels.quantize_torch.decode`, on the CPU."""
    out = torch.empty(count)
    _decode(scale.contiguous().numpy(), codes.contiguous().numpy(), out.numpy())
    return out


@njit(nogil=True, cache=True, error_model="numpy")
def _encode(
    values: int,
    size: int,
    like: Array,
    index: int,
    count: int,
    levels: int,
    cap: float,
    uniform: int,
    scale: int,
    codes: int,
) -> bool:
    """All arrays by their address; 0 stands for none. False if an index is out of bounds."""
    x, at = array_at(values, size, like), array_at(index, count, LONGS)
    drawn, out = array_at(uniform, count, SINGLES), array_at(codes, count, _CODES)
    scales = array_at(scale, (count + BLOCK - 1) // BLOCK, SINGLES)
    block, singles = np.empty(BLOCK, np.float32), np.zeros(BLOCK, np.int8)
    for number in range(scales.size):
        start, stop = number * BLOCK, min((number + 1) * BLOCK, count)
        part = block[: stop - start]
        if index == 0:
            _copy(x[start:stop], part)
        elif not _gather(x, at[start:stop], part):
            return False
        scales[number] = step = _scale(part, np.float32(levels), np.float32(cap))
        # A pair's codes are put together afterwards; an odd last one is paired with zero.
        singles[part.size & ~1 :] = 0
        line = singles if levels == 7 else out[start:stop]
        if not step > 0.0:
            line[:] = 0
        elif uniform == 0:
            _to_nearest(part, step, line)
        else:
            _at_random(part, step, np.float32(levels), drawn[start:stop], line)
        if levels == 7:
            _store_pairs(singles, out[start >> 1 : (stop + 1) >> 1])
    return True


@njit(nogil=True, cache=True)
def _copy(x: Array, out: Array) -> None:
    for i in range(out.size):
        out[i] = x[i]


@njit(nogil=True, cache=True)
def _gather(x: Array, index: Array, out: Array) -> bool:
    for i in range(index.size):
        at = np.uint64(index[i])
        if at >= np.uint64(x.size):
            return False
        out[i] = x[at]
    return True


def _make_float(typing_context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


_from_bits: Any = intrinsic(_make_float)
"""The float32 that has these bits."""


@njit(nogil=True, cache=True, error_model="numpy")
def _scale(values: Array, levels: Any, cap: Any) -> Any:
    bits = values.view(np.uint32)
    largest = np.uint32(0)
    for i in range(bits.size):
        largest = max(largest, np.uint32(bits[i] & _MAGNITUDE))
    if largest >= _INFINITY:
        return np.float32(np.nan)
    scale = min(_from_bits(largest) / levels, cap)
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
        codes[i] = np.int8(line[2 * i] & 15) | np.int8((line[2 * i + 1] & 15) << 4)


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
