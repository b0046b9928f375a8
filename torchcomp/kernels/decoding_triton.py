"""Kernels that decode sparse messages and add them. :mod:`.sparse_triton` launches them.

All messages have the same segments at the same places of their rows. A step over all of them:

1. `count_bits`: every program counts the set bits of its block of an index code's high part.
2. `decode`: the counts of the blocks before it tell a block the number of its first entry. It
   stores where the set bits are, then computes each entry's index from that and its low part, and
   checks it. Entries with equal high parts have adjacent bits, and all others are in order by their
   high parts: each entry is compared with the one before it only if their bits are adjacent.
3. `add_up`: each program adds the entries of all messages that fall into its tile of the vector,
   one message after another. Every sum is therefore in the order of the messages. The tile stays in
   the cache until all messages are added. A mean also zeroes and divides it there.

`work` is one tensor of int32, for what the kernels pass on:

- the indices, (messages, entries);
- the number of set bits, (messages, blocks);
- 1 if a code is damaged, otherwise 0;
- each message's first and last entry of each tile, (tiles, 2, messages).

Bytes moved per element of the vector, for a mean of W messages with 1 % of the entries: 4 to write
the mean, and per message 0.03 of values, codes and indices that are written and read: 14 for 64.
"""

import triton.language as tl

from torchcomp.kernels.coding_triton import less
from torchcomp.kernels.fields_triton import values_of
from torchcomp.kernels.table_triton import (
    BIT_PROGRAM,
    BIT_PROGRAMS,
    CODE,
    CODED,
    CODES,
    END,
    FILL_PROGRAM,
    FIRST,
    HIGH,
    LOW_BITS,
    START,
    TILE_PROGRAM,
    VALUES,
    K,
    N,
    column,
    segment_of,
)
from torchcomp.kernels.triton_jit import INFINITY, clamped, kernel, magnitude, number, rounded


@kernel()
def bits_in(byte: tl.tensor) -> tl.tensor:
    """Return how many bits of bytes are set."""
    # Add neighbouring counts of 1, 2 and 4 bits.
    byte -= (byte >> 1) & 0x55
    byte = (byte & 0x33) + ((byte >> 2) & 0x33)
    return (byte + (byte >> 4)) & 15


@kernel("words")
def check_headers(
    raw: tl.tensor,
    differences: tl.tensor,
    message: tl.tensor,
    headers: tl.tensor,
    words: tl.tensor,
    HEADERS: tl.constexpr,
) -> None:
    """Write in which bits the headers of a message differ from what they should be.

    Args:
        raw: the message, which begins at a multiple of 4 bytes.
        differences: words of 32 bits, (messages, words).
        message: its number.
        headers: for each word its byte in the message, and then for each word its value; int64.
        words: number of words.
        HEADERS: at least `words`.
    """
    i = tl.arange(0, HEADERS)
    inside = i < words
    at = tl.load(headers + i, mask=inside, other=0) >> 2
    wanted = tl.load(headers + words + i, mask=inside, other=0).to(tl.int32)
    found = tl.load(raw.to(tl.pointer_type(tl.int32)) + at, mask=inside, other=0)
    out = differences.to(tl.pointer_type(tl.int32)) + message * words + i
    tl.store(out, found ^ wanted, mask=inside)


@kernel("rows", "entries", "programs", "messages", "stride", "words")
def count_bits(
    received: tl.tensor,
    work: tl.tensor,
    differences: tl.tensor,
    table: tl.tensor,
    rows: tl.tensor,
    entries: tl.tensor,
    programs: tl.tensor,
    messages: tl.tensor,
    stride: tl.tensor,
    headers: tl.tensor,
    words: tl.tensor,
    BYTES: tl.constexpr,
    HEADERS: tl.constexpr,
) -> None:
    """Count the set bits of a block of BYTES bytes of a message's high part.

    Also check the message's headers, if HEADERS.
    """
    block, message = tl.program_id(0), tl.program_id(1).to(tl.int64)
    counts = work + messages.to(tl.int64) * entries
    if (block == 0) & (message == 0):
        tl.store(counts + messages.to(tl.int64) * programs, 0)
    if HEADERS > 0:  # noqa: SIM102, as the compiler decides it
        if block == 0:
            raw = received + message * stride
            check_headers(raw, differences, message, headers, words, HEADERS)
    row = segment_of(block, table, rows, BIT_PROGRAM)
    begin, size = tl.load(row + HIGH), (tl.load(row + END) - tl.load(row + HIGH)).to(tl.int32)
    at = (block - column(row, BIT_PROGRAM)) * BYTES + tl.arange(0, BYTES)
    byte = tl.load(received + message * stride + begin + at, mask=at < size, other=0)
    tl.store(counts + message * programs + block, tl.sum(bits_in(byte.to(tl.int32)), 0))


@kernel()
def low_parts(
    raw: tl.tensor, offset: tl.tensor, i: tl.tensor, low: tl.tensor, mask: tl.tensor
) -> tl.tensor:
    """Return the low parts, of `low` bits, of entries `i` of a code.

    Args:
        raw: begins at a multiple of 4 bytes.
        offset: byte of `raw` at which the code begins.
        i: numbers of the entries.
        low: width of their low parts, at most 31.
        mask: the entries. The result is zero for others.
    """
    words = (raw + (offset & -4)).to(tl.pointer_type(tl.uint32))
    bit = i * low + 8 * (offset & 3).to(tl.int32)
    mask = mask & (low > 0)
    this = tl.load(words + (bit >> 5), mask=mask, other=0).to(tl.int64)
    over = mask & ((bit & 31) + low > 32)
    following = tl.load(words + (bit >> 5) + 1, mask=over, other=0).to(tl.int64)
    part = ((following << 32) | this) >> (bit & 31)
    return part.to(tl.int32) & ((1 << low) - 1)


@kernel("rows", "entries", "programs", "messages", "stride")
def decode(
    received: tl.tensor,
    work: tl.tensor,
    table: tl.tensor,
    rows: tl.tensor,
    entries: tl.tensor,
    programs: tl.tensor,
    messages: tl.tensor,
    stride: tl.tensor,
    BYTES: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Write the indices of a block of BYTES bytes of a message's high part."""
    program, message = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = segment_of(program, table, rows, BIT_PROGRAM)
    block, start, n, k = (
        program - column(row, BIT_PROGRAM),
        column(row, START),
        column(row, N),
        column(row, K),
    )
    index = work + message * entries + column(row, FIRST)
    if column(row, CODED) == 0:  # all are sent, or none
        stop = tl.minimum(block * (8 * BYTES) + 8 * BYTES, k)
        for first in range(block * (8 * BYTES), stop, CHUNK):
            i = first + tl.arange(0, CHUNK)
            tl.store(index + i, start + i, mask=i < stop)
    else:
        raw, low = received + message * stride, column(row, LOW_BITS)
        code, high_part = tl.load(row + CODE), tl.load(row + HIGH)
        size = (tl.load(row + END) - high_part).to(tl.int32)
        all_counts = work + messages.to(tl.int64) * entries
        counts = all_counts + message * programs + column(row, BIT_PROGRAM)
        total = tl.zeros((CHUNK,), tl.int32)
        for early in range(0, block, CHUNK):
            before = early + tl.arange(0, CHUNK)
            total += tl.load(counts + before, mask=before < block, other=0)
        base = tl.sum(total, 0)  # the number of the block's first entry

        at = block * BYTES + tl.arange(0, BYTES)
        byte = tl.load(raw + high_part + at, mask=at < size, other=0).to(tl.int32)
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
        bad = tl.sum(wrong, 0)
        if block == column(row, BIT_PROGRAMS) - 1:
            used = (k * low) & 7
            padding = tl.load(raw + high_part - 1, mask=used > 0, other=0).to(tl.int32)
            bad += ((end != k) | ((padding >> used) > 0)).to(tl.int32)
            # Any indices within the segment, if there are too few bits.
            for first in range(end, k, CHUNK):
                i = first + tl.arange(0, CHUNK)
                tl.store(index + i, start + i, mask=i < k)
        if bad > 0:
            tl.store(all_counts + messages.to(tl.int64) * programs, 1)


# --- Values ---------------------------------------------------------------------------------------


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


@kernel()
def first_from(
    index: tl.tensor, begin: tl.tensor, end: tl.tensor, target: tl.tensor, mask: tl.tensor
) -> tl.tensor:
    """Return where the first number of at least `target` is in each of several ascending lists.

    Args:
        index: a pointer to each list.
        begin: the number of the first entry to look at.
        end: one past the last entry to look at.
        target: the number.
        mask: the lists.
    """
    below = tl.zeros_like(mask.to(tl.int32)) + begin
    above = tl.zeros_like(below) + end
    left = end - begin
    while left > 0:
        middle = (below + above) // 2
        open_ = mask & (below < above)
        earlier = open_ & (tl.load(index + middle, mask=open_, other=0) < target)
        above = tl.where(earlier, above, middle)
        below = tl.where(earlier, middle + 1, below)
        left = left // 2
    return below


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
    dtype: tl.constexpr = sums.dtype.element_ty
    program = tl.program_id(0)
    row = segment_of(program, table, rows, TILE_PROGRAM)
    start_of, n = tl.multiple_of(column(row, START), STEP), tl.multiple_of(column(row, N), STEP)
    begin = start_of + (program - column(row, TILE_PROGRAM)) * TILE
    end = tl.minimum(begin + TILE, start_of + n)
    many = messages.to(tl.int64)
    flag = work + many * entries + many * programs
    damaged = tl.load(flag) > 0
    if MEAN:
        for part in range(begin, end, PART):
            at = part + tl.arange(0, PART)
            tl.store(sums + at, tl.zeros((PART,), dtype), mask=at < end)

    lane = tl.arange(0, LANES)
    live = lane < messages
    first, k = column(row, FIRST), column(row, K)
    lists = work + lane.to(tl.int64) * entries
    ranges = flag + 1 + 2 * many * program
    tl.store(ranges + lane, first_from(lists, first, first + k, begin, live), mask=live)
    tl.store(ranges + many + lane, first_from(lists, first, first + k, end, live), mask=live)
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
        raw += stride
        index += entries
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
    elif (begin == 0) & damaged:
        tl.store(out, float("nan"))


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
        mean = tl.where(damaged & (at == 0), float("nan"), mean)
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
