"""Exact selection in Triton, for CUDA. Shapes are static, and the host never waits.

1. Radix search: each of three rounds builds a histogram of the next digit of the magnitudes' bits,
   and chooses the digit of the k-th largest. The first round also adds the summands.
2. Every block counts its entries above the k-th largest magnitude and those equal to it. The counts
   give the block's offset in the result, and how many equal entries it keeps.
3. Every block writes the indices of the entries that it keeps.

Each entry is read five times: 20 bytes for float32. The L2 cache saves the part that fits into it.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchcomp.kernels.select import Scratch

_BLOCK = 4096
# Each digit is the bits below the first number, down to the second: 11, 10 and 10 bits. Bit 31, the
# sign, is not part of a magnitude.
_DIGITS = ((31, 20), (20, 10), (10, 0))
_BINS = 2048

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Offsets are 32-bit, and the last block can reach past the end of the vector.
LIMIT = 2**31 - _BLOCK
SUMS = tuple((dtype, torch.float32, torch.float32) for dtype in DTYPES)
"""Supported dtypes of two summands and their sum."""


def select(x: Tensor, k: int, scratch: Scratch, summands: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return the indices that :func:`torchcomp.kernels.select.add_and_select` returns.

    `scratch` is not used: this form keeps nothing between steps.
    """
    n = x.numel()
    grid = (triton.cdiv(n, _BLOCK),)
    # Triton launches on the current device, which can differ from the device of `x`. -1 changes
    # nothing: in Triton's interpreter, tensors are on the CPU.
    with torch.cuda.device(x.device.index if x.is_cuda else -1):
        state = _threshold(x, k, summands, grid)
        above, tied = torch.empty((2, *grid), dtype=torch.int32, device=x.device)
        _tally[grid](x, state, above, tied, n, BLOCK=_BLOCK)
        # Of the ties, keep those of the lowest blocks until the k are complete.
        quota = (state[1] - (tied.cumsum(0) - tied)).clamp_(min=0).minimum(tied)
        start = (above + quota).cumsum(0) - above - quota
        chosen = torch.empty(k, dtype=torch.int64, device=x.device)
        _write[grid](x, state, start, quota, chosen, n, BLOCK=_BLOCK)
    return chosen


def _threshold(
    x: Tensor, k: int, summands: tuple[Tensor, Tensor] | None, grid: tuple[int]
) -> Tensor:
    """Return two integers: bits of the k-th largest magnitude, and how many of its ties to keep."""
    state = torch.zeros(2, dtype=torch.int32, device=x.device)
    # fill_, because assigning a number would copy from the host and wait for the stream.
    state[1].fill_(k)
    counts = torch.zeros(_BINS, dtype=torch.int32, device=x.device)
    g, e = summands or (x, x)
    for high, low in _DIGITS:
        add = summands is not None and high == 31
        _count[grid](g, e, x, state, counts, x.numel(), high, low, add, BLOCK=_BLOCK, BINS=_BINS)
        _choose[(1,)](state, counts, high - low, BINS=_BINS)
    return state


def _jit(kernel: Callable[..., Any]) -> Any:
    """``triton.jit`` with type annotations, for mypy."""
    return triton.jit(kernel)


@_jit
def _number(x: tl.tensor) -> tl.tensor:
    # Convert the bits, because Triton's interpreter flushes bfloat16 denormals to zero.
    if x.dtype == tl.bfloat16:
        wide = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
        x = wide.to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@_jit
def _key(x: tl.tensor) -> tl.tensor:
    # Without the sign, bits order as magnitudes do. NaN counts as infinity.
    bits = _number(x).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.minimum(bits, 0x7F800000)


@_jit
def _count(
    g: tl.tensor,
    e: tl.tensor,
    x: tl.tensor,
    state: tl.tensor,
    counts: tl.tensor,
    n: tl.tensor,
    high: tl.constexpr,
    low: tl.constexpr,
    add: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    if add:
        value = _number(tl.load(g + at, mask=inside, other=0.0))
        value += tl.load(e + at, mask=inside, other=0.0)
        tl.store(x + at, value, mask=inside)
    else:
        value = tl.load(x + at, mask=inside, other=0.0)
    key = _key(value)
    # Count only entries whose higher digits match those chosen so far. In the first round there are
    # none: two shifts, by 30 bits and by 1, leave 0 of every key.
    matches = inside & ((key >> (high - 1)) >> 1 == tl.load(state))
    digit = (key >> low) & ((1 << (high - low)) - 1)
    found = tl.histogram(digit, BINS, mask=matches)
    bins = tl.arange(0, BINS)
    # The mask saves the atomics of empty bins.
    tl.atomic_add(counts + bins, found, mask=found > 0)


@_jit
def _choose(state: tl.tensor, counts: tl.tensor, width: tl.constexpr, BINS: tl.constexpr) -> None:
    bins = tl.arange(0, BINS)
    count = tl.load(counts + bins)
    prefix, rank = tl.load(state), tl.load(state + 1)
    above = tl.sum(count, 0) - tl.cumsum(count, 0)  # with a larger digit
    # `above + count` falls with the digit. Counting the digits at which it reaches `rank` therefore
    # gives the largest of them plus 1.
    digit = tl.sum((above + count >= rank).to(tl.int32), 0) - 1
    tl.store(state, (prefix << width) | digit)
    tl.store(state + 1, rank - tl.sum(tl.where(bins == digit, above, 0), 0))
    # Clear the histogram for the next round.
    tl.store(counts + bins, tl.zeros_like(count))


@_jit
def _compare(x: tl.tensor, state: tl.tensor, n: tl.tensor, BLOCK: tl.constexpr) -> tl.tuple:
    """Return a block's positions, and masks of entries above and equal to the k-th largest."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    key, threshold = _key(tl.load(x + at, mask=inside, other=0.0)), tl.load(state)
    return at, inside & (key > threshold), inside & (key == threshold)


@_jit
def _tally(
    x: tl.tensor,
    state: tl.tensor,
    above: tl.tensor,
    tied: tl.tensor,
    n: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    _, larger, equal = _compare(x, state, n, BLOCK)
    tl.store(above + block, tl.sum(larger.to(tl.int32), 0))
    tl.store(tied + block, tl.sum(equal.to(tl.int32), 0))


@_jit
def _write(
    x: tl.tensor,
    state: tl.tensor,
    start: tl.tensor,
    quota: tl.tensor,
    chosen: tl.tensor,
    n: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    at, larger, tied = _compare(x, state, n, BLOCK)
    first = tl.cumsum(tied.to(tl.int32), 0) <= tl.load(quota + block)
    keep = larger | (tied & first)
    # Blocks and their entries are in order, so the indices ascend.
    position = tl.load(start + block) + tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.store(chosen + position, at.to(tl.int64), mask=keep)
