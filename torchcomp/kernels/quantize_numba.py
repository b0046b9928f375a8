"""Block quantization in Numba, for the CPU. Results equal those of plain torch bit for bit."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from torchcomp.kernels import quantize
from torchcomp.kernels.numba_jit import kernel
from torchcomp.kernels.quantize import BLOCK, LEVELS, largest_scale
from torchcomp.routes.wire import Parts

_SMALLEST = np.finfo(np.float32).tiny
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)


def encode(values: Tensor, fmt: str | None, noise: Tensor | None) -> Parts:
    """Encode the values of a message; see :func:`torchcomp.kernels.quantize.encode`."""
    if fmt not in LEVELS:
        return quantize.encode(values, fmt, noise)
    levels, count = LEVELS[fmt], values.numel()
    scale = torch.empty(-(-count // BLOCK))
    if fmt == "int4":
        codes = torch.empty((count + 1) // 2, dtype=torch.uint8)
    else:
        codes = torch.empty(count, dtype=torch.int8)
    x, uniform = values.detach().float().contiguous(), None if noise is None else noise.numpy()
    _encode(x.numpy(), levels, largest_scale(levels), uniform, scale.numpy(), codes.numpy())
    return scale, codes


def decode(messages: Sequence[Sequence[Tensor]], count: int, dtype: torch.dtype) -> Tensor:
    """Decode messages; see :func:`torchcomp.kernels.quantize.decode`."""
    if len(messages[0]) == 1:
        return quantize.decode(messages, count, dtype)
    values = torch.empty(len(messages), count)
    for (scale, codes), out in zip(messages, values.numpy(), strict=True):
        form = _decode if codes.dtype == torch.int8 else _decode_pairs
        form(scale.contiguous().numpy(), codes.contiguous().numpy(), out)
    return values.to(dtype)


@kernel(error_model="numpy")
def _encode(x, levels, cap, uniform, scales, codes):
    singles = np.empty(BLOCK, np.int8)  # codes that are not yet paired
    for number in range(scales.size):
        start, stop = number * BLOCK, min((number + 1) * BLOCK, x.size)
        part = x[start:stop]
        scales[number] = step = _scale(part, np.float32(levels), np.float32(cap))
        # int4 codes are packed in pairs after rounding. An odd last code is paired with zero.
        singles[part.size & ~1 :] = 0
        line = singles if levels == 7 else codes[start:stop].view(np.int8)
        if not step > 0.0:  # also true for NaN
            line[: part.size] = 0
        elif uniform is None:
            _to_nearest(part, step, line)
        else:
            _at_random(part, step, np.float32(levels), uniform[start:stop], line)
        if levels == 7:
            pairs = codes[start >> 1 : (stop + 1) >> 1]
            for i in range(pairs.size):
                pairs[i] = (singles[2 * i] & 15) | ((singles[2 * i + 1] & 15) << 4)


@kernel(error_model="numpy")
def _scale(values, levels, cap):
    # Without the sign, the bits of floats order as the magnitudes do, with NaN above infinity.
    # Comparing integers, which have no NaN, lets LLVM vectorize the search.
    bits = values.view(np.uint32)
    largest = np.uint32(0)
    for i in range(bits.size):
        largest = max(largest, np.uint32(bits[i] & _MAGNITUDE))
    if largest >= _INFINITY:
        return np.float32(np.nan)
    scale = min(np.uint32(largest).view(np.float32) / levels, cap)
    return scale if scale >= _SMALLEST else np.float32(0.0)


@kernel(error_model="numpy")
def _to_nearest(values, step, line):
    # No clamp here: a quotient exceeds the last level by at most a rounding error, which rint
    # removes.
    for i in range(values.size):
        line[i] = np.int8(np.rint(values[i] / step))


@kernel(error_model="numpy")
def _at_random(values, step, levels, uniform, line):
    for i in range(values.size):
        # Clamp: with floor, a rounding error beyond the last level could give a code beyond it.
        quotient = min(max(values[i] / step, -levels), levels)
        lower = np.floor(quotient)
        line[i] = np.int8(lower) + (uniform[i] < quotient - lower)


@kernel()
def _decode(scale, codes, out):
    for i in range(np.uint64(out.size)):
        out[i] = np.float32(codes[i]) * scale[i // np.uint64(BLOCK)]


@kernel()
def _decode_pairs(scale, codes, out):
    for i in range(np.uint64(out.size)):
        nibble = (codes[i >> np.uint64(1)] >> (np.uint64(4) * (i & np.uint64(1)))) & 15
        out[i] = np.float32((np.int32(nibble) ^ 8) - 8) * scale[i // np.uint64(BLOCK)]
