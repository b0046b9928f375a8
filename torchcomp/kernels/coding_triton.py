"""Kernels that write the messages of given entries, decode messages, and add them up.

1. `count_bits` counts the set bits of each block of an index code's high part.
2. `decode`: the counts of the blocks before it tell a block the number of its first entry. It
   computes indices from the places of bits and the low parts. Only entries with adjacent bits can
   be out of order: all others are in order by their high parts.
3. `add_up`: each program adds the entries of all messages that fall into its tile of the vector,
   one message after another, while the tile is in the cache.

`work` has int32 numbers: 1 if a code is damaged, otherwise 0; the number of set bits, (messages,
blocks); then, in their place, each message's first and last entry of each tile.
"""

import triton.language as tl

from torchcomp.kernels import table_triton as col
from torchcomp.kernels.frames_triton import values_of, written
from torchcomp.kernels.table_triton import column, segment_of
from torchcomp.kernels.triton_jit import kernel, narrowed, number, rounded

# --- Writing --------------------------------------------------------------------------------------


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


# --- Decoding -------------------------------------------------------------------------------------


@kernel()
def bits_in(byte):
    """Return how many bits of bytes are set."""
    # Add neighbouring counts of 1, 2 and 4 bits.
    byte -= (byte >> 1) & 0x55
    byte = (byte & 0x33) + ((byte >> 2) & 0x33)
    return (byte + (byte >> 4)) & 15


@kernel()
def check_headers(raw, differences, headers, frames, FRAMES: tl.constexpr):
    """Write in which bits the headers of frames differ from what they should be."""
    i = tl.arange(0, FRAMES)
    begin, first, second = header(headers, frames, FRAMES)
    words = raw.to(tl.pointer_type(tl.int64)) + (begin >> 3)
    first ^= tl.load(words, mask=begin >= 0, other=0)
    second ^= tl.load(words + 1, mask=begin >= 0, other=0)
    tl.store(differences + 2 * i, tl.where(begin >= 0, first, 0), mask=i < frames)
    tl.store(differences + 2 * i + 1, tl.where(begin >= 0, second, 0), mask=i < frames)


@kernel("rows", "stride", "frames")
def count_bits(
    received, work, differences, table, rows, stride, headers, frames,
    BYTES: tl.constexpr, FRAMES: tl.constexpr,
):  # fmt: skip
    """Count the set bits of a block of BYTES bytes of a message's high part."""
    block, message = tl.program_id(0), tl.program_id(1).to(tl.int64)
    counts = work + 1 + message * tl.num_programs(0)
    if (block == 0) & (message == 0):
        tl.store(work, 0)
        if FRAMES > 0:
            check_headers(received, differences, headers, frames, FRAMES)
    row = segment_of(block, table, rows, col.BIT_PROGRAM)
    begin = tl.load(row + col.HIGH)
    size = (tl.load(row + col.END) - begin).to(tl.int32)
    at = (block - column(row, col.BIT_PROGRAM)) * BYTES + tl.arange(0, BYTES)
    byte = tl.load(received + message * stride + begin + at, mask=at < size, other=0)
    tl.store(counts + block, tl.sum(bits_in(byte.to(tl.int32)), 0))


@kernel()
def low_parts(raw, offset, i, low, mask):
    """Return the low parts, of `low` bits, of entries `i` of a code."""
    words = (raw + (offset & -4)).to(tl.pointer_type(tl.uint32))
    bit = i * low + 8 * (offset & 3).to(tl.int32)
    mask = mask & (low > 0)
    this = tl.load(words + (bit >> 5), mask=mask, other=0).to(tl.int64)
    over = mask & ((bit & 31) + low > 32)
    following = tl.load(words + (bit >> 5) + 1, mask=over, other=0).to(tl.int64)
    part = ((following << 32) | this) >> (bit & 31)
    return part.to(tl.int32) & ((1 << low) - 1)


@kernel()
def place_bits(high, size, counts, block, index, k, BYTES: tl.constexpr, CHUNK: tl.constexpr):
    """Write where the set bits of a block are to `index`."""
    total = tl.zeros((CHUNK,), tl.int32)
    for early in range(0, block, CHUNK):
        before = early + tl.arange(0, CHUNK)
        total += tl.load(counts + before, mask=before < block, other=0)
    base = tl.sum(total, 0)  # the number of the block's first entry

    at = block * BYTES + tl.arange(0, BYTES)
    byte = tl.load(high + at, mask=at < size, other=0).to(tl.int32)
    ones = bits_in(byte)
    rank = base + tl.cumsum(ones, 0) - ones
    end = base + tl.sum(ones, 0)
    for place in tl.static_range(8):
        one = (byte >> place) & 1
        # A damaged code can have more set bits than entries.
        tl.store(index + rank, 8 * at + place, mask=(one > 0) & (rank < k))
        rank += one
    # Other threads of this program read what this one has written.
    tl.debug_barrier()
    return base, end


@kernel()
def finish_indices(raw, code, high_part, low, base, end, index, start, n, k, CHUNK: tl.constexpr):
    """Replace the places of bits in `index` by indices. Return how many cannot be right."""
    stop = tl.minimum(end, k)
    wrong = tl.zeros((CHUNK,), tl.int32)
    for first in range(base, stop, CHUNK):
        i = first + tl.arange(0, CHUNK)
        inside = i < stop
        bit_at = tl.load(index + i, mask=inside, other=0)
        part = low_parts(raw, code, i, low, inside)
        # A high part that is too large would give an index of at least n. How large does not
        # matter. If there is no low part, the high part is a bitmap.
        high = tl.minimum(bit_at - tl.where(low > 0, i, 0), ((n - 1) >> low) + 1)
        local = (high << low) | part
        tl.store(index + i, start + tl.minimum(local, n - 1), mask=inside)
        follows = inside & (bit_at > 0) & (low > 0)
        neighbour = tl.load(raw + high_part + ((bit_at - 1) >> 3), mask=follows, other=0)
        adjacent = follows & ((neighbour.to(tl.int32) >> ((bit_at - 1) & 7)) & 1 > 0)
        previous = low_parts(raw, code, i - 1, low, adjacent)
        # This also covers the high part's padding: a bit set there decodes to an index of at
        # least n.
        wrong |= ((adjacent & (part <= previous)) | (inside & (local >= n))).to(tl.int32)
    return tl.sum(wrong, 0)


@kernel("rows", "entries", "stride")
def decode(
    received, work, index, table, rows, entries, stride, BYTES: tl.constexpr, CHUNK: tl.constexpr
):
    """Write the indices of a block of BYTES bytes of a message's high part."""
    program, message = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = segment_of(program, table, rows, col.BIT_PROGRAM)
    block, start, n, k = (
        program - column(row, col.BIT_PROGRAM),
        column(row, col.START),
        column(row, col.N),
        column(row, col.K),
    )
    index += message * entries + column(row, col.FIRST)
    if column(row, col.CODED) == 0:  # all are sent, or none
        stop = tl.minimum(block * (8 * BYTES) + 8 * BYTES, k)
        for first in range(block * (8 * BYTES), stop, CHUNK):
            i = first + tl.arange(0, CHUNK)
            tl.store(index + i, start + i, mask=i < stop)
    else:
        raw, low = received + message * stride, column(row, col.LOW_BITS)
        code, high_part = tl.load(row + col.CODE), tl.load(row + col.HIGH)
        size = (tl.load(row + col.END) - high_part).to(tl.int32)
        counts = work + 1 + message * tl.num_programs(0) + column(row, col.BIT_PROGRAM)
        base, end = place_bits(raw + high_part, size, counts, block, index, k, BYTES, CHUNK)
        bad = finish_indices(raw, code, high_part, low, base, end, index, start, n, k, CHUNK)
        if block == column(row, col.BIT_PROGRAMS) - 1:
            used = (k * low) & 7
            padding = tl.load(raw + high_part - 1, mask=used > 0, other=0).to(tl.int32)
            bad += ((end != k) | ((padding >> used) > 0)).to(tl.int32)
            # Any indices within the segment, if there are too few bits.
            for first in range(end, k, CHUNK):
                i = first + tl.arange(0, CHUNK)
                tl.store(index + i, start + i, mask=i < k)
        if bad > 0:
            tl.store(work, 1)


# --- Adding ---------------------------------------------------------------------------------------


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

    From one message to the next are `stride` bytes and, if COUNTED, `step` rows of the table. All
    starts and lengths of segments are multiples of STEP: wide accesses need 16.
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
