"""Kernels that add the values of sparse messages to a vector. :mod:`.sparse_triton` launches them.

What they share with other kernels is in :mod:`.decoding_triton`.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False

import triton.language as tl

from torchcomp.kernels import table_triton as col
from torchcomp.kernels.coding_triton import less
from torchcomp.kernels.fields_triton import values_of
from torchcomp.kernels.table_triton import column, segment_of
from torchcomp.kernels.triton_jit import kernel, number, rounded


@kernel("rows")
def subtract(
    x, frame, index, weight, table, rows,
    VALUE: tl.constexpr, LEVELS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Subtract `weight` times the values of a message at its indices, where they are finite."""
    row = segment_of(tl.program_id(0), table, rows, col.FILL_PROGRAM)
    i = (tl.program_id(0) - column(row, col.FILL_PROGRAM)) * BLOCK + tl.arange(0, BLOCK)
    inside = i < column(row, col.K)
    at = x + tl.load(index + column(row, col.FIRST) + i, mask=inside, other=0)
    value = values_of(
        frame + tl.load(row + col.VALUES), frame + tl.load(row + col.CODES), i, inside,
        LEVELS, VALUE, ALIGNED,
    )  # fmt: skip
    old = number(tl.load(at, mask=inside, other=0.0))
    tl.store(at, less(old, value, weight, x.dtype.element_ty), mask=inside)


@kernel("entries", "messages", "step")
def find(index, entries, messages, row, step, target, out, LANES: tl.constexpr):
    """Write where each message's first index of at least `target` is."""
    lane = tl.arange(0, LANES)
    live = lane < messages
    lists, own = index + lane.to(tl.int64) * entries, row + lane * (step * col.WIDTH)
    below = tl.load(own + col.FIRST, mask=live, other=0).to(tl.int32)
    k = tl.load(own + col.K, mask=live, other=0).to(tl.int32)
    above = below + k
    left = tl.max(k, 0)
    while left > 0:
        middle = (below + above) // 2
        open_ = live & (below < above)
        earlier = open_ & (tl.load(lists + middle, mask=open_, other=0) < target)
        above = tl.where(earlier, above, middle)
        below = tl.where(earlier, middle + 1, below)
        left = left // 2
    tl.store(out + lane, below, mask=live)


@kernel()
def fields_at(row):
    """Return where both fields of a segment's values begin, and the number of its first entry."""
    return tl.load(row + col.VALUES), tl.load(row + col.CODES), column(row, col.FIRST)


@kernel("rows", "entries", "messages", "stride", "step")
def add_up(
    received, work, index, out, divisor, table, rows, entries, messages, stride, step,
    COUNTED: tl.constexpr, VALUE: tl.constexpr, LEVELS: tl.constexpr, ALIGNED: tl.constexpr,
    STEP: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Write the mean of the messages in a tile. They are added in order.

    Args:
        received: the messages.
        work: see :mod:`.decoding_triton`.
        index: likewise.
        out: the vector. Values and sums are rounded to its dtype.
        divisor: of the sum.
        table: the segments, which cover the vector.
        rows: number of segments of each message.
        entries: number of entries of each message.
        messages: number of messages.
        stride: bytes from one message to the next.
        step: number of rows from one message to the next, if COUNTED.
        COUNTED: whether each message has its own segments.
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
    row = segment_of(program, table, rows, col.TILE_PROGRAM)
    start_of = tl.multiple_of(column(row, col.START), STEP)
    n = tl.multiple_of(column(row, col.N), STEP)
    begin = start_of + (program - column(row, col.TILE_PROGRAM)) * TILE
    end = tl.minimum(begin + TILE, start_of + n)
    many = messages.to(tl.int64)
    damaged = tl.load(work) > 0
    for part in range(begin, end, PART):
        at = part + tl.arange(0, PART)
        tl.store(out + at, tl.zeros((PART,), out.dtype.element_ty), mask=at < end)

    ranges = work + 1 + 2 * many * program
    find(index, entries, messages, row, step, begin, ranges, LANES)
    find(index, entries, messages, row, step, end, ranges + many, LANES)
    # Other threads of this program read what this one has written, here and below.
    tl.debug_barrier()

    number_one, number_two, first = fields_at(row)
    count = tl.where(damaged, 0, messages)
    # The entries of the next message are loaded while those of the last one are added.
    start, stop = tl.load(ranges), tl.load(ranges + many)
    raw = received
    i = start + tl.arange(0, CHUNK)
    place = tl.load(index + i, mask=i < stop, other=0)
    value = values_of(
        raw + number_one, raw + number_two, i - first, i < stop, LEVELS, VALUE, ALIGNED
    )
    for message in range(0, count):
        last_start, last_stop, last_place, last_value = start, stop, place, value
        last_raw, last_index = raw, index
        last_one, last_two, last_first = number_one, number_two, first
        more = message + 1 < messages
        start = tl.load(ranges + message + 1, mask=more, other=0)
        stop = tl.load(ranges + many + message + 1, mask=more, other=0)
        raw, index = raw + stride, index + entries
        if COUNTED:
            row += tl.where(more, step * col.WIDTH, 0)
            number_one, number_two, first = fields_at(row)
        i = start + tl.arange(0, CHUNK)
        place = tl.load(index + i, mask=i < stop, other=0)
        value = values_of(
            raw + number_one, raw + number_two, i - first, i < stop, LEVELS, VALUE, ALIGNED
        )
        last_i = last_start + tl.arange(0, CHUNK)
        add(out, last_place, last_value, last_i < last_stop)
        # A tile seldom has more than CHUNK entries of a message.
        for rest in range(last_start + CHUNK, last_stop, CHUNK):
            other = rest + tl.arange(0, CHUNK)
            inside = other < last_stop
            target = tl.load(last_index + other, mask=inside, other=0)
            added = values_of(
                last_raw + last_one, last_raw + last_two, other - last_first, inside,
                LEVELS, VALUE, ALIGNED,
            )  # fmt: skip
            add(out, target, added, inside)
        tl.debug_barrier()
    divide(out, begin, end, divisor, damaged, PART)


@kernel()
def divide(out, begin, end, divisor, damaged, PART: tl.constexpr):
    """Divide a tile of sums. If a code is damaged, write NaN."""
    for part in range(begin, end, PART):
        at = part + tl.arange(0, PART)
        total = number(tl.load(out + at, mask=at < end, other=0.0))
        mean = tl.div_rn(total, tl.zeros_like(total) + divisor)
        # All of it: each rank looks at a part for a NaN.
        mean = tl.where(damaged, float("nan"), mean)
        tl.store(out + at, rounded(mean, out.dtype.element_ty), mask=at < end)


@kernel()
def add(out, place, value, mask):
    """Add values of a message, rounded to the dtype of `out`."""
    dtype: tl.constexpr = out.dtype.element_ty
    value = number(rounded(value, dtype))
    total = number(tl.load(out + place, mask=mask, other=0.0)) + value
    tl.store(out + place, rounded(total, dtype), mask=mask)
