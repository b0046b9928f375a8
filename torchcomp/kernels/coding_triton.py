"""Kernels that write the messages of given entries. :mod:`.sparse_triton` launches them."""

import triton.language as tl

from torchcomp.kernels import table_triton as col
from torchcomp.kernels.fields_triton import written
from torchcomp.kernels.table_triton import column, segment_of
from torchcomp.kernels.triton_jit import kernel, narrowed, number, rounded


@kernel()
def set_bits(row, frame, i, local, mask):
    """Set the bits of entries in the index code of their segment."""
    low, high_part = column(row, col.LOW_BITS), tl.load(row + col.HIGH)
    low_part = tl.load(row + col.CODE)
    # If there is no low part, the high part is a bitmap of the indices.
    bit = (local >> low) + tl.where(low > 0, i, 0) + 8 * (high_part & 3).to(tl.int32)
    words = (frame + (high_part & -4)).to(tl.pointer_type(tl.int32))
    one = tl.full(bit.shape, 1, tl.int32) << (bit & 31)
    tl.atomic_or(words + (bit >> 5), one, mask=mask, sem="relaxed")
    bit = i * low + 8 * (low_part & 3).to(tl.int32)
    words = (frame + (low_part & -4)).to(tl.pointer_type(tl.int32))
    part = (local & ((1 << low) - 1)).to(tl.int64) << (bit & 31)
    mask = mask & (low > 0)
    tl.atomic_or(words + (bit >> 5), part.to(tl.int32), mask=mask, sem="relaxed")
    over = mask & ((bit & 31) + low > 32)
    tl.atomic_or(words + (bit >> 5) + 1, (part >> 32).to(tl.int32), mask=over, sem="relaxed")


@kernel("rows")
def clear(frame, table, rows, CHUNK: tl.constexpr):
    """Set the bytes of the index codes to zero."""
    row = segment_of(tl.program_id(0), table, rows, col.FILL_PROGRAM)
    own = tl.program_id(0) - column(row, col.FILL_PROGRAM)
    begin, programs = tl.load(row + col.CODE), column(row, col.FILL_PROGRAMS)
    size = (tl.load(row + col.END) - begin).to(tl.int32)
    for first in range(own * CHUNK, size, programs * CHUNK):
        at = first + tl.arange(0, CHUNK)
        tl.store(frame + begin + at, tl.zeros((CHUNK,), tl.uint8), mask=at < size)


@kernel("rows", "frames")
def code(frame, index, table, rows, headers, frames, BLOCK: tl.constexpr, FRAMES: tl.constexpr):
    """Set the bits of indices in the index codes, and write the headers of the frames if FRAMES."""
    if FRAMES > 0:  # noqa: SIM102, as the compiler decides it
        if tl.program_id(0) == 0:
            begin, first, second = header(headers, frames, FRAMES)
            words = frame.to(tl.pointer_type(tl.int64)) + (begin >> 3)
            tl.store(words, first, mask=begin >= 0)
            tl.store(words + 1, second, mask=begin >= 0)
    row = segment_of(tl.program_id(0), table, rows, col.FILL_PROGRAM)
    own, k = tl.program_id(0) - column(row, col.FILL_PROGRAM), column(row, col.K)
    i = own * BLOCK + tl.arange(0, BLOCK)
    inside = (i < k) & (column(row, col.CODED) > 0)
    local = tl.load(index + column(row, col.FIRST) + i, mask=inside, other=0).to(tl.int32)
    set_bits(row, frame, i, tl.maximum(local - column(row, col.START), 0), inside)


@kernel()
def header(headers, frames, FRAMES: tl.constexpr):
    """Return for each frame where it begins, and the two words of its header."""
    i = tl.arange(0, FRAMES)
    begin = tl.load(headers + 3 * i, mask=i < frames, other=-1)
    first = tl.load(headers + 3 * i + 1, mask=i < frames, other=0)
    second = tl.load(headers + 3 * i + 2, mask=i < frames, other=0)
    return begin, first, second


@kernel("rows", "largest_scale")
def fill(
    x, frame, index, noise, table, rows, largest_scale,
    SUBTRACT: tl.constexpr, RANDOM: tl.constexpr, SOURCE: tl.constexpr, VALUE: tl.constexpr,
    LEVELS: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Encode the values of `x` at the indices, and write their fields."""
    dtype: tl.constexpr = x.dtype.element_ty
    row = segment_of(tl.program_id(0), table, rows, col.FILL_PROGRAM)
    k, first = column(row, col.K), column(row, col.FIRST)
    block = (tl.program_id(0) - column(row, col.FILL_PROGRAM)) * ROWS + tl.arange(0, ROWS)
    # Two values at a time, as int4 codes are sent in pairs.
    even = block[:, None] * 128 + 2 * tl.arange(0, 64)[None, :]
    odd = even + 1
    low_at = tl.load(index + first + even, mask=even < k, other=0)
    high_at = tl.load(index + first + odd, mask=odd < k, other=0)
    old_low = number(tl.load(x + low_at, mask=even < k, other=0.0))
    old_high = number(tl.load(x + high_at, mask=odd < k, other=0.0))
    low, high = narrowed(old_low, dtype, SOURCE), narrowed(old_high, dtype, SOURCE)
    drawn_low, drawn_high = low, high
    if RANDOM:
        drawn_low = tl.load(noise + first + even, mask=even < k, other=0.0)
        drawn_high = tl.load(noise + first + odd, mask=odd < k, other=0.0)
    low, high = written(
        frame + tl.load(row + col.VALUES), frame + tl.load(row + col.CODES), block, even, k,
        low, high, drawn_low, drawn_high, largest_scale, SOURCE, VALUE, LEVELS, RANDOM, ALIGNED,
    )  # fmt: skip
    if SUBTRACT:
        tl.store(x + low_at, less(old_low, low, 1.0, dtype), mask=even < k)
        tl.store(x + high_at, less(old_high, high, 1.0, dtype), mask=odd < k)


@kernel()
def less(x, value, weight, dtype: tl.constexpr):
    """Return ``x - weight * value`` in `dtype`, each step rounded; `x` if `value` is not finite."""
    value = number(rounded(value, dtype))
    finite = tl.abs(value) < float("inf")  # not true for NaN
    product = number(rounded(tl.where(finite, value, 0.0) * weight, dtype))
    return rounded(x - product, dtype)
