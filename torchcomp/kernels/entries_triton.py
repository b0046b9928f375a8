"""Entries of messages in Triton, for CUDA. Results equal those of plain torch bit for bit.

Messages are added tile by tile of the vector: each program adds the entries of all messages that
fall into its tile, one message after another. Every sum is therefore in the order of the messages.
The tile stays in the cache until all messages are added. A mean also zeroes and divides it there.

Bytes moved per element of the vector, for a mean of W messages with a share s of the entries: 4 to
write the mean, and per message s (4 + i) to read values and indices of i = 4 or 8 bytes. For 8
messages of 1 % with i = 4, this is 4.6; one pass over the vector for each message and two more to
zero and divide it would take 17.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchcomp.kernels.triton_jit import EXACT, kernel, number, on_device_of, rounded

_TILE = 4096
"""Elements of the vector that a program adds to: 16 KiB of float32."""

_CHUNK = 128
"""Entries of a message that a program adds at once; at 1 %, a tile has 41."""

_BLOCK = 512
"""Numbers that a program handles at once in all other steps."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Supported dtypes of values and vectors."""

# Offsets within the vector and within a message are 32-bit.
LIMIT = 2**31 - _TILE


def subtract(x: Tensor, index: Tensor, values: Tensor, weight: float) -> None:
    """Compute ``x[index] -= weight * values`` in place, where the values are finite.

    Args:
        x: 1-D, contiguous, of one of DTYPES.
        index: 1-D int64 or int32, contiguous, k elements, distinct and within bounds.
        values: 1-D, contiguous, k elements, of one of DTYPES. They are first rounded to the dtype
            of `x`, and so is their product with `weight`.
        weight: factor on the values.
    """
    k = index.numel()
    with on_device_of(x):
        if k:
            _subtract[(triton.cdiv(k, _BLOCK),)](
                x, index, values, k, float(weight), BLOCK=_BLOCK, **EXACT
            )


def accumulate(
    out: Tensor, index: Tensor, values: Tensor, damaged: Tensor, weight: float = 1.0
) -> None:
    """Add `weight` times each message to `out`, in order.

    If a message is damaged, nothing is added and all of `out` becomes NaN.

    Args:
        out: 1-D, contiguous, n < LIMIT elements, of one of DTYPES.
        index: (W, k) int64 or int32, contiguous: for each of W >= 1 messages its k indices, within
            [0, n). They ascend strictly unless `damaged` is true.
        values: (W, k) of one of DTYPES, with contiguous rows: a view of W frames will do. Like in
            :func:`subtract`, values and their products are rounded to the dtype of `out`.
        damaged: scalar bool tensor.
        weight: factor on the values, exact in the dtype of `out`.
    """
    _add(out, index, values, damaged, weight, 0)


def mean(out: Tensor, index: Tensor, values: Tensor, damaged: Tensor, divisor: int) -> None:
    """Write the sum of all messages, in order, divided by `divisor`, to `out`.

    The arguments are those of :func:`accumulate`. The values that `out` had do not matter.
    """
    _add(out, index, values, damaged, 1.0, divisor)


def _add(
    out: Tensor, index: Tensor, values: Tensor, damaged: Tensor, weight: float, divisor: int
) -> None:
    (count, k), n = index.shape, out.numel()
    tiles = triton.cdiv(n, _TILE)
    with on_device_of(out):
        if n:
            starts = torch.empty((count, tiles + 1), dtype=torch.int32, device=out.device)
            _find[(triton.cdiv(tiles + 1, _BLOCK), count)](
                index, starts, k, tiles, TILE=_TILE, BLOCK=_BLOCK, **EXACT
            )
            _add_up[(tiles,)](
                out, index, values, damaged.view(torch.uint8), starts,
                n, k, values.stride(0), count, tiles, float(weight), divisor,
                MEAN=divisor > 0, TILE=_TILE, CHUNK=_CHUNK, WIDE=_BLOCK,
                num_warps=2, **EXACT,
            )  # fmt: skip


# --- Kernels --------------------------------------------------------------------------------------


@kernel("k")
def _subtract(
    x: tl.tensor,
    index: tl.tensor,
    values: tl.tensor,
    k: tl.tensor,
    weight: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    dtype: tl.constexpr = x.dtype.element_ty
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < k
    at = x + tl.load(index + i, mask=inside, other=0)
    value = number(rounded(number(tl.load(values + i, mask=inside, other=0.0)), dtype))
    finite = tl.abs(value) < float("inf")  # not true for NaN
    product = number(rounded(tl.where(finite, value, 0.0) * weight, dtype))
    old = number(tl.load(at, mask=inside, other=0.0))
    tl.store(at, rounded(old - product, dtype), mask=inside)


@kernel("k", "tiles")
def _find(
    index: tl.tensor,
    starts: tl.tensor,
    k: tl.tensor,
    tiles: tl.tensor,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Find each message's first entry of every tile, by binary search."""
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    message = tl.program_id(1)
    below = tl.zeros((BLOCK,), tl.int32)  # every entry before it is of an earlier tile
    above = tl.zeros((BLOCK,), tl.int32) + k  # every entry from it on is not
    left = k
    while left > 0:
        middle = (below + above) // 2
        at = index + message.to(tl.int64) * k + middle
        open_ = below < above
        earlier = open_ & (tl.load(at, mask=open_, other=0) // TILE < tile)
        below = tl.where(earlier, middle + 1, below)
        above = tl.where(earlier, above, middle)
        left = left // 2
    tl.store(starts + message * (tiles + 1) + tile, below, mask=tile <= tiles)


@kernel("n", "k", "stride", "count", "tiles", "divisor")
def _add_up(
    out: tl.tensor,
    index: tl.tensor,
    values: tl.tensor,
    damaged: tl.tensor,
    starts: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    stride: tl.tensor,
    count: tl.tensor,
    tiles: tl.tensor,
    weight: tl.tensor,
    divisor: tl.tensor,
    MEAN: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    dtype: tl.constexpr = out.dtype.element_ty
    tile = tl.program_id(0)
    end = tl.minimum(tile * TILE + TILE, n)
    if MEAN:
        for part in range(tile * TILE, end, WIDE):
            at = part + tl.arange(0, WIDE)
            tl.store(out + at, tl.zeros((WIDE,), dtype), mask=at < end)
        # Other threads of this program add to what this one has written.
        tl.debug_barrier()
    sound = tl.load(damaged) == 0
    # Of the message: its first entry in `index`, and in `values`.
    first, own = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    for message in range(0, tl.where(sound, count, 0)):
        start = tl.load(starts + message * (tiles + 1) + tile)
        stop = tl.load(starts + message * (tiles + 1) + tile + 1)
        for part in range(start, stop, CHUNK):
            i = part + tl.arange(0, CHUNK)
            inside = i < stop
            target = out + tl.load(index + first + i, mask=inside, other=0)
            value = number(tl.load(values + own + i, mask=inside, other=0.0))
            value = number(rounded(value, dtype))
            total = number(tl.load(target, mask=inside, other=0.0))
            total += number(rounded(value * weight, dtype))
            tl.store(target, rounded(total, dtype), mask=inside)
        first += k
        own += stride
        tl.debug_barrier()
    if MEAN:
        for part in range(tile * TILE, end, WIDE):
            at = part + tl.arange(0, WIDE)
            total = number(tl.load(out + at, mask=at < end, other=0.0))
            total = tl.div_rn(total, divisor.to(tl.float32))
            tl.store(out + at, rounded(total, dtype), mask=at < end)
    if sound == 0:
        tl.debug_barrier()
        for part in range(tile * TILE, end, WIDE):
            at = part + tl.arange(0, WIDE)
            tl.store(out + at, float("nan"), mask=at < end)
