"""Kernels that add the values of sparse messages to a vector. :mod:`.sparse_triton` launches them.

What they share with other kernels in `work` is in :mod:`.decoding_triton`.
"""

import triton.language as tl

from torchcomp.kernels.coding_triton import less
from torchcomp.kernels.fields_triton import values_of
from torchcomp.kernels.table_triton import (
    CODES,
    FILL_PROGRAM,
    FIRST,
    START,
    TILE_PROGRAM,
    VALUES,
    K,
    N,
    column,
    segment_of,
)
from torchcomp.kernels.triton_jit import INFINITY, clamped, kernel, magnitude, number, rounded


@kernel("rows")
def subtract(
    x: tl.tensor,
    frame: tl.tensor,
    index: tl.tensor,
    weight: tl.tensor,
    table: tl.tensor,
    rows: tl.tensor,
    VALUE: tl.constexpr,
    LEVELS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Subtract `weight` times the values of a message at its indices, where they are finite."""
    row = segment_of(tl.program_id(0), table, rows, FILL_PROGRAM)
    i = (tl.program_id(0) - column(row, FILL_PROGRAM)) * BLOCK + tl.arange(0, BLOCK)
    inside = i < column(row, K)
    at = x + tl.load(index + column(row, FIRST) + i, mask=inside, other=0)
    value = values_of(
        frame + tl.load(row + VALUES), frame + tl.load(row + CODES), i, inside,
        LEVELS, VALUE, ALIGNED,
    )  # fmt: skip
    old = number(tl.load(at, mask=inside, other=0.0))
    tl.store(at, less(old, value, weight, x.dtype.element_ty), mask=inside)


@kernel("entries", "messages")
def find(
    index: tl.tensor,
    entries: tl.tensor,
    messages: tl.tensor,
    first: tl.tensor,
    k: tl.tensor,
    target: tl.tensor,
    out: tl.tensor,
    LANES: tl.constexpr,
) -> None:
    """Write where each message's first index of at least `target` is.

    Args:
        index: the indices, (messages, entries).
        entries: number of entries of each message.
        messages: number of messages.
        first: number of the segment's first entry.
        k: number of its entries.
        target: an index.
        out: has room for a number for each message.
        LANES: at least `messages`.
    """
    lane = tl.arange(0, LANES)
    live = lane < messages
    lists = index + lane.to(tl.int64) * entries
    below = tl.zeros((LANES,), tl.int32) + first
    above = below + k
    left = k
    while left > 0:
        middle = (below + above) // 2
        open_ = live & (below < above)
        earlier = open_ & (tl.load(lists + middle, mask=open_, other=0) < target)
        above = tl.where(earlier, above, middle)
        below = tl.where(earlier, middle + 1, below)
        left = left // 2
    tl.store(out + lane, below, mask=live)


@kernel("rows", "entries", "programs", "messages", "stride")
def add_up(
    received: tl.tensor,
    work: tl.tensor,
    out: tl.tensor,
    residual: tl.tensor,
    sums: tl.tensor,
    finite: tl.tensor,
    factor: tl.tensor,
    table: tl.tensor,
    rows: tl.tensor,
    entries: tl.tensor,
    programs: tl.tensor,
    messages: tl.tensor,
    stride: tl.tensor,
    MEAN: tl.constexpr,
    WIDE: tl.constexpr,
    FINITE: tl.constexpr,
    VALUE: tl.constexpr,
    LEVELS: tl.constexpr,
    ALIGNED: tl.constexpr,
    STEP: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    """Add the messages in a tile, in order.

    Args:
        received: the messages.
        work: see above.
        out: the vector. It is `sums` rounded to its dtype.
        residual: if WIDE, the error of this rounding is added to it.
        sums: the vector in which messages are added. Values and products are rounded to its dtype.
        finite: becomes NaN if an element of a mean is not finite, if FINITE.
        factor: divisor of the sum if MEAN, otherwise factor on the values.
        table: the segments, which cover the vector.
        rows: number of segments.
        entries: number of entries of each message.
        programs: number of programs of `decode` for each message.
        messages: number of messages.
        stride: bytes from one message to the next.
        MEAN: whether `sums` is set to zero first, and divided at the end.
        WIDE: whether `sums` is another tensor than `out`.
        FINITE: whether to tell if the mean is finite.
        VALUE: dtype of the values of the messages, if LEVELS is 0.
        LEVELS: 127 for int8, 7 for int4, 0 if there are no scales.
        ALIGNED: whether fields begin at multiples of the size of their numbers.
        STEP: what all starts and lengths of segments are multiples of: wide accesses need 16.
        LANES: at least `messages`.
        TILE: elements of a tile.
        CHUNK: entries that are added at once.
        PART: elements that are zeroed and divided at once.
    """
    program = tl.program_id(0)
    row = segment_of(program, table, rows, TILE_PROGRAM)
    start_of, n = tl.multiple_of(column(row, START), STEP), tl.multiple_of(column(row, N), STEP)
    begin = start_of + (program - column(row, TILE_PROGRAM)) * TILE
    end = tl.minimum(begin + TILE, start_of + n)
    many = messages.to(tl.int64)
    flag = work + many * entries + many * programs
    damaged = tl.load(flag) > 0
    if MEAN:
        write_all(sums, begin, end, False, PART)

    first, k = column(row, FIRST), column(row, K)
    ranges = flag + 1 + 2 * many * program
    find(work, entries, messages, first, k, begin, ranges, LANES)
    find(work, entries, messages, first, k, end, ranges + many, LANES)
    # Other threads of this program read what this one has written, here and below.
    tl.debug_barrier()

    number_one, number_two = tl.load(row + VALUES), tl.load(row + CODES)
    count = tl.where(damaged, 0, messages)
    # The entries of the next message are loaded while those of the last one are added.
    start, stop = tl.load(ranges), tl.load(ranges + many)
    raw, index = received, work
    i = start + tl.arange(0, CHUNK)
    place = tl.load(index + i, mask=i < stop, other=0)
    value = values_of(
        raw + number_one, raw + number_two, i - first, i < stop, LEVELS, VALUE, ALIGNED
    )
    for message in range(0, count):
        last_start, last_stop, last_place, last_value = start, stop, place, value
        last_raw, last_index = raw, index
        more = message + 1 < messages
        start = tl.load(ranges + message + 1, mask=more, other=0)
        stop = tl.load(ranges + many + message + 1, mask=more, other=0)
        raw, index = raw + stride, index + entries
        i = start + tl.arange(0, CHUNK)
        place = tl.load(index + i, mask=i < stop, other=0)
        value = values_of(
            raw + number_one, raw + number_two, i - first, i < stop, LEVELS, VALUE, ALIGNED
        )
        last_i = last_start + tl.arange(0, CHUNK)
        add(sums, last_place, last_value, factor, last_i < last_stop, MEAN)
        # A tile seldom has more than CHUNK entries of a message.
        for rest in range(last_start + CHUNK, last_stop, CHUNK):
            other = rest + tl.arange(0, CHUNK)
            inside = other < last_stop
            target = tl.load(last_index + other, mask=inside, other=0)
            added = values_of(
                last_raw + number_one, last_raw + number_two, other - first, inside,
                LEVELS, VALUE, ALIGNED,
            )  # fmt: skip
            add(sums, target, added, factor, inside, MEAN)
        tl.debug_barrier()
    if MEAN:
        finish(out, residual, sums, finite, factor, begin, end, damaged, WIDE, FINITE, PART)
    elif damaged:
        # All of it: each rank looks at a part for a NaN.
        write_all(out, begin, end, True, PART)


@kernel()
def write_all(
    x: tl.tensor, begin: tl.tensor, end: tl.tensor, NAN: tl.constexpr, PART: tl.constexpr
) -> None:
    """Write zeros, or NaN if NAN, from `begin` to before `end`."""
    for part in range(begin, end, PART):
        at = part + tl.arange(0, PART)
        values = tl.full((PART,), float("nan") if NAN else 0.0, x.dtype.element_ty)
        tl.store(x + at, values, mask=at < end)


@kernel()
def add(
    sums: tl.tensor,
    place: tl.tensor,
    value: tl.tensor,
    weight: tl.tensor,
    mask: tl.tensor,
    MEAN: tl.constexpr,
) -> None:
    """Add values of a message, rounded to the dtype of `sums`; times `weight` if not MEAN."""
    dtype: tl.constexpr = sums.dtype.element_ty
    value = number(rounded(value, dtype))
    if not MEAN:
        value = number(rounded(value * weight, dtype))
    total = number(tl.load(sums + place, mask=mask, other=0.0)) + value
    tl.store(sums + place, rounded(total, dtype), mask=mask)


@kernel()
def finish(
    out: tl.tensor,
    residual: tl.tensor,
    sums: tl.tensor,
    finite: tl.tensor,
    divisor: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    damaged: tl.tensor,
    WIDE: tl.constexpr,
    FINITE: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    """Divide a tile of sums. Round it to the dtype of `out` if WIDE, and keep the error."""
    largest = tl.zeros((PART,), tl.int32)
    for part in range(begin, end, PART):
        at = part + tl.arange(0, PART)
        inside = at < end
        total = number(tl.load(sums + at, mask=inside, other=0.0))
        mean = tl.div_rn(total, tl.zeros_like(total) + divisor)
        mean = tl.where(damaged, float("nan"), mean)
        store_mean(out, residual, at, mean, inside, sums.dtype.element_ty, WIDE)
        largest = tl.maximum(largest, tl.where(inside, magnitude(mean), 0))
    if FINITE:
        tell(finite, largest)


@kernel()
def tell(finite: tl.tensor, largest: tl.tensor) -> None:
    """Make `finite` NaN if one of several magnitudes is that of an infinity or NaN."""
    if tl.max(largest, 0) >= INFINITY:
        tl.store(finite, float("nan"))


@kernel()
def store_mean(
    out: tl.tensor,
    residual: tl.tensor,
    at: tl.tensor,
    mean: tl.tensor,
    mask: tl.tensor,
    dtype: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Store float32 means, rounded to `dtype`; if WIDE, as `write_mean` of the residual does."""
    mean = rounded(mean, dtype)
    if WIDE:
        to: tl.constexpr = out.dtype.element_ty
        mean = number(mean)
        small = rounded(clamped(mean, dtype, to), to)
        tl.store(out + at, small, mask=mask)
        error = number(tl.load(residual + at, mask=mask, other=0.0)) + (mean - number(small))
        tl.store(residual + at, rounded(error, residual.dtype.element_ty), mask=mask)
    else:
        tl.store(out + at, mean, mask=mask)
