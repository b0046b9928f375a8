"""Quantized values in Triton, for CUDA. Results equal those of plain torch bit for bit.

One call quantizes all segments: blocks of 128 begin anew in each. See :mod:`.quantize`.

Bytes moved per float32 value for int8: encoding reads 4 and writes 1.03, plus 4 for random numbers.
Decoding reads 1.03 and writes 4. The torch form reads and writes the values about 10 times.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchcomp.kernels.fields_triton import code_of, extended, scale_of
from torchcomp.kernels.quantize import BLOCK, LEVELS, largest_scale
from torchcomp.kernels.segments_triton import Rows, Segment, row_of, table
from torchcomp.kernels.triton_jit import EXACT, kernel, number, on_device_of

_ROWS = 4
"""Blocks of 128 values per program."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Supported dtypes of values."""


def encode(
    values: Tensor, segments: Sequence[Segment], levels: int, uniform: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Quantize the values of all segments.

    Args:
        values: 1-D, contiguous, of one of DTYPES: the k values of each segment (start, n, k),
            one segment after another.
        segments: the segments, as host integers.
        levels: 127 for int8 or 7 for int4.
        uniform: None rounds to nearest. Otherwise float32 like `values`, drawn from [0, 1): a value
            is rounded up if its number is below the fraction.

    Returns:
        The scales, float32, and the codes, int8 or pairs in uint8. Both are 1-D, one segment after
        another, and contain what :func:`torchcomp.kernels.quantize.encode` returns for each.
    """
    device, pairs = values.device, levels == LEVELS["int4"]
    with on_device_of(values):
        scale = torch.empty(sum(_blocks(k) for _, _, k in segments), device=device)
        count = sum((k + 1) // 2 if pairs else k for _, _, k in segments)
        codes = torch.empty(count, dtype=torch.uint8 if pairs else torch.int8, device=device)
        rows, programs = table(_placed, device, segments, (_ROWS, 2 if pairs else 1))
        if programs:
            drawn = values if uniform is None else uniform
            _encode[(programs,)](
                values, drawn, rows, rows.shape[0], scale, codes, largest_scale(levels),
                RANDOM=uniform is not None, PAIRS=pairs, LEVELS=levels, ROWS=_ROWS, BLOCK=BLOCK,
                **EXACT,
            )  # fmt: skip
    return scale, codes


def decode(scale: Tensor, codes: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Return the values of all segments in float32, one segment after another.

    Args:
        scale: as :func:`encode` returns it, of any contents.
        codes: int8, or uint8 for pairs, as :func:`encode` returns it, of any contents.
        segments: the segments, as host integers.
    """
    pairs = codes.dtype == torch.uint8
    with on_device_of(codes):
        values = torch.empty(sum(k for _, _, k in segments), device=codes.device)
        rows, programs = table(_placed, codes.device, segments, (_ROWS, 2 if pairs else 1))
        if programs:
            _decode[(programs,)](
                scale,
                codes,
                rows,
                rows.shape[0],
                values,
                PAIRS=pairs,
                ROWS=_ROWS,
                BLOCK=BLOCK,
                **EXACT,
            )
    return values


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


def _placed(segments: Sequence[Segment], sizes: tuple[int, int]) -> tuple[Rows, int]:
    """Return for each segment where its values, scales and codes begin, and how many it has."""
    rows_per_program, codes_per_byte = sizes
    rows, program, first, scale, code = [], 0, 0, 0, 0
    for _, _, k in segments:
        if k:
            rows.append((program, first, scale, code, k))
        program += triton.cdiv(_blocks(k), rows_per_program)
        first += k
        scale += _blocks(k)
        code += triton.cdiv(k, codes_per_byte)
    return tuple(rows), program


# --- Kernels --------------------------------------------------------------------------------------


@kernel("rows")
def _encode(
    values: tl.tensor,
    uniform: tl.tensor,
    table: tl.tensor,
    rows: tl.tensor,
    scales: tl.tensor,
    codes: tl.tensor,
    largest_scale: tl.tensor,
    RANDOM: tl.constexpr,
    PAIRS: tl.constexpr,
    LEVELS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = row_of(tl.program_id(0), table, rows, 5)
    first, k = tl.load(row + 1), tl.load(row + 4)
    block = (tl.program_id(0) - tl.load(row)) * ROWS + tl.arange(0, ROWS)
    # Two values at a time, as int4 codes are sent in pairs.
    even = block[:, None] * BLOCK + 2 * tl.arange(0, BLOCK // 2)[None, :]
    odd = even + 1
    low = number(tl.load(values + first + even, mask=even < k, other=0.0))
    high = number(tl.load(values + first + odd, mask=odd < k, other=0.0))

    scale = scale_of(low, high, largest_scale, LEVELS)
    tl.store(scales + tl.load(row + 2) + block, scale, mask=block * BLOCK < k)

    drawn_low, drawn_high = low, high
    if RANDOM:
        drawn_low = tl.load(uniform + first + even, mask=even < k, other=0.0)
        drawn_high = tl.load(uniform + first + odd, mask=odd < k, other=0.0)
    low = code_of(low, drawn_low, scale[:, None], RANDOM, LEVELS)
    high = code_of(high, drawn_high, scale[:, None], RANDOM, LEVELS)
    start = codes + tl.load(row + 3)
    if PAIRS:
        tl.store(start + even // 2, ((low & 15) | ((high & 15) << 4)).to(tl.uint8), mask=even < k)
    else:
        tl.store(start + even, low.to(tl.int8), mask=even < k)
        tl.store(start + odd, high.to(tl.int8), mask=odd < k)


@kernel("rows")
def _decode(
    scales: tl.tensor,
    codes: tl.tensor,
    table: tl.tensor,
    rows: tl.tensor,
    values: tl.tensor,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = row_of(tl.program_id(0), table, rows, 5)
    k = tl.load(row + 4)
    i = (tl.program_id(0) - tl.load(row)) * (ROWS * BLOCK) + tl.arange(0, ROWS * BLOCK)
    start = codes + tl.load(row + 3)
    if PAIRS:
        pair = tl.load(start + i // 2, mask=i < k, other=0).to(tl.int32)
        code = extended((pair >> (4 * (i & 1)).to(tl.int32)) & 15)
    else:
        code = tl.load(start + i, mask=i < k, other=0).to(tl.int32)
    scale = tl.load(scales + tl.load(row + 2) + i // BLOCK, mask=i < k, other=0.0)
    tl.store(values + tl.load(row + 1) + i, code.to(tl.float32) * scale, mask=i < k)
