"""Passes of the selection over vectors and candidates, compiled by Numba.

Magnitudes are compared by their bits, which order as the numbers do; NaN counts as infinite. Arrays
are contiguous, and every pass releases the GIL.
"""

from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from torchcomp.kernels.numba_bits import trailing_zeros

Array = NDArray[Any]

DIGIT = 12
"""Bits of a magnitude that a histogram tells apart."""

WORD = 64
"""Entries that are compared at once: a bit each of one integer."""

STREAMS = llvm.get_process_triple().startswith("x86_64")
"""Whether sums can be written past the caches here."""

_LINE = 64
"""Bytes of a cache line: what a store past the caches should fill."""

_AHEAD = 1024
"""So many entries ahead summands are fetched: the processor's own prefetching ends with a page."""


# --- Instructions ---------------------------------------------------------------------------------


def _vector(context: Any, builder: Any, array: Any, value: Any, at: Any, lanes: int) -> Any:
    """Pointer to some entries of an array, as one vector."""
    data = context.make_array(array)(context, builder, value).data
    vector = ir.VectorType(data.type.pointee, lanes)
    return builder.bitcast(builder.gep(data, [at]), vector.as_pointer())


def _load(context: Any, builder: Any, array: Any, value: Any, at: Any, lanes: int) -> Any:
    loaded = builder.load(_vector(context, builder, array, value, at, lanes))
    loaded.align = array.dtype.bitwidth // 8
    return loaded


def _prefetch(context: Any, builder: Any, array: Any, value: Any, at: Any) -> None:
    """Have WORD entries from a place on fetched; the place may be past the end."""
    data = context.make_array(array)(context, builder, value).data
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    prefetch = builder.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
    entries = _LINE * 8 // array.dtype.bitwidth
    for line in range(0, WORD, entries):
        start = builder.gep(data, [builder.add(at, at.type(line))])
        read, all_levels, of_data = word(0), word(3), word(1)
        builder.call(prefetch, [builder.bitcast(start, byte), read, all_levels, of_data])


def _sum(context: Any, builder: Any, signature: Any, args: Any, lanes: int) -> Any:
    """Bits of g + e from a place on; args begin with g, e and the place."""
    g, e = (
        _load(context, builder, array, value, args[2], lanes)
        for array, value in zip(signature.args[:2], args[:2], strict=True)
    )
    if g.type.element == ir.IntType(16):  # bfloat16: Numba knows it by its bits alone
        wide = ir.VectorType(ir.IntType(32), lanes)
        g = builder.shl(builder.zext(g, wide), ir.Constant(wide, [16] * lanes))
        g = builder.bitcast(g, e.type)
    word = ir.IntType(signature.args[1].dtype.bitwidth)
    return builder.bitcast(builder.fadd(g, e), ir.VectorType(word, lanes))


def _compare(builder: Any, bits: Any, bound: Any) -> Any:
    """Which of WORD entries have a magnitude of at least the bound: a bit each."""
    undefined = ir.Constant(bits.type, ir.Undefined)
    first = builder.insert_element(undefined, bound, ir.IntType(32)(0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), WORD), [0] * WORD)
    bounds = builder.shuffle_vector(first, undefined, lanes)
    unsigned = ir.Constant(bits.type, [(1 << (bits.type.element.width - 1)) - 1] * WORD)
    passes = builder.icmp_unsigned(">=", builder.and_(bits, unsigned), bounds)
    return builder.bitcast(passes, ir.IntType(WORD))


def _make_passing(typing_context: Any, bits: Any, at: Any, bound: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _compare(builder, _load(context, builder, bits, args[0], args[1], WORD), args[2])

    return types.uint64(bits, types.int64, bits.dtype), generate


_passing: Any = intrinsic(_make_passing)
"""Which of the WORD entries from a place on have a magnitude of at least the bound.

Few do, so a branch for each would be mispredicted for each; this takes one instruction for 16.
"""


def _make_add_passing(stream: bool) -> Any:
    def make(typing_context: Any, g: Any, e: Any, at: Any, bits: Any, bound: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            total = _sum(context, builder, signature, args, WORD)
            start = _vector(context, builder, bits, args[3], args[2], WORD)
            store = builder.store(total, start, align=_LINE if stream else bits.dtype.bitwidth // 8)
            if stream:
                ahead = builder.add(args[2], args[2].type(_AHEAD))
                _prefetch(context, builder, g, args[0], ahead)
                _prefetch(context, builder, e, args[1], ahead)
                hint = builder.module.add_metadata([ir.IntType(32)(1)])
                store.set_metadata("nontemporal", hint)
            return _compare(builder, total, args[4])

        return types.uint64(g, e, types.int64, bits, bits.dtype), generate

    return make


_add_passing: Any = intrinsic(_make_add_passing(stream=False))
"""The same of g + e, which are written to `bits`."""

_stream_passing: Any = intrinsic(_make_add_passing(stream=True))
"""The same, where `bits` is written to memory without reading its lines first.

The place must be at the beginning of a line, and nobody but this thread may read before a fence.
"""


def _make_sum_at(typing_context: Any, g: Any, e: Any, at: Any) -> Any:
    word = types.Integer.from_bitwidth(e.dtype.bitwidth, signed=False)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        total = _sum(context, builder, signature, args, 1)
        return builder.extract_element(total, ir.IntType(32)(0))

    return word(g, e, types.int64), generate


_sum_at: Any = intrinsic(_make_sum_at)
"""Bits of one entry of g + e."""


def _make_magnitude(typing_context: Any, bits: Any, infinity: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, top = args
        unsigned = builder.and_(word, word.type((1 << (word.type.width - 1)) - 1))
        return builder.select(builder.icmp_unsigned("<", unsigned, top), unsigned, top)

    return bits(bits, bits), generate


_magnitude: Any = intrinsic(_make_magnitude)
"""Bits of a magnitude, where NaN is infinite."""


def _make_fence(typing_context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if STREAMS:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse.sfence", (), kind), [])
        return context.get_dummy_value()

    return types.void(), generate


_fence: Any = intrinsic(_make_fence)
"""Makes what was written past the caches visible to other threads."""


# --- Candidates -----------------------------------------------------------------------------------


@njit(nogil=True, cache=True)
def _passing_few(
    g: Any, e: Any, bits: Array, start: int, stop: int, bound: Any, infinity: Any
) -> Any:
    """What the instructions above do, for fewer than WORD entries."""
    word = np.uint64(0)
    for at in range(start, stop):
        if g is not None:
            bits[at] = _sum_at(g, e, at)
        if _magnitude(bits[at], infinity) >= bound:
            word |= np.uint64(1) << np.uint64(at - start)
    return word


@njit(nogil=True, cache=True)
def _append(
    word: Any,
    start: int,
    g: Any,
    e: Any,
    bits: Array,
    bound: Any,
    shift: Any,
    infinity: Any,
    key: Array,
    place: Array,
    histogram: Array,
    count: int,
) -> int:
    """Append the candidates that `word` names to the others; returns how many there are then."""
    last = np.uint64(histogram.size - 1)
    while word:
        i = start + trailing_zeros(word)
        word &= word - np.uint64(1)
        # Added again: what was written past the caches would come from far away.
        magnitude = _magnitude(bits[i] if g is None else _sum_at(g, e, i), infinity)
        key[count] = magnitude
        place[count] = i
        histogram[min(np.uint64(magnitude - bound) >> shift, last)] += 1
        count += 1
    return count


@njit(nogil=True, cache=True)
def collect(
    g: Any,
    e: Any,
    bits: Array,
    stream: bool,
    bound: Any,
    shift: Any,
    infinity: Any,
    key: Array,
    place: Array,
    histogram: Array,
) -> int:
    """Collect the entries of magnitude `bound` or more, and count their digits from `bound` on.

    Args:
        g: first summand, or None.
        e: second summand, or None.
        bits: the sum, which is written here if there are summands.
        stream: write it past the caches.
        bound: at most `infinity`.
        shift: bits below the digit. The last digit stands for all that is above it, too.
        infinity: bits of infinity.
        key: the candidates' magnitudes. Has room for WORD more than can be collected.
        place: where they are.
        histogram: of their digits.

    Returns:
        The number of candidates; -1 if they do not fit. The sum is complete then, too.
    """
    histogram[:] = 0
    start = count = 0
    stop = min(-bits.ctypes.data % _LINE // bits.itemsize, bits.size) if stream else 0
    while start < bits.size:
        if stop - start < WORD:
            word = _passing_few(g, e, bits, start, stop, bound, infinity)
        elif g is None:
            word = _passing(bits, start, bound)
        elif stream:
            word = _stream_passing(g, e, start, bits, bound)
        else:
            word = _add_passing(g, e, start, bits, bound)
        if word and 0 <= count <= key.size - WORD:
            count = _append(
                word, start, g, e, bits, bound, shift, infinity, key, place, histogram, count
            )
        elif word:
            count = -1
        start, stop = stop, min(stop + WORD, bits.size)
    if stream:
        _fence()
    return count


@njit(nogil=True, cache=True)
def sums(g: Array, e: Array, at: Array, bits: Array) -> None:
    """Bits of some entries of the sum."""
    for i in range(at.size):
        bits[i] = _sum_at(g, e, at[i])


# --- The k-th largest -----------------------------------------------------------------------------


@njit(nogil=True, cache=True)
def count_digits(keys: Array, low: Any, shift: Any, infinity: Any, histogram: Array) -> None:
    """Of the keys from `low` on, as far as the histogram reaches, how many have which digit."""
    histogram[:] = 0
    digits = np.uint64(histogram.size)
    for i in range(keys.size):
        digit = np.uint64(np.uint64(_magnitude(keys[i], infinity)) - low) >> shift
        if digit < digits:
            histogram[digit] += 1


@njit(nogil=True, cache=True)
def find_digit(histograms: Array, rest: int, below: Array) -> tuple[int, int]:
    """The digit of the key that has `rest` keys below it in all histograms.

    Args:
        histograms: a row for each chunk.
        rest: number of keys below.
        below: gets added the keys of each chunk with a smaller digit.

    Returns:
        The digit, and how many keys with this digit are below.
    """
    digit = 0
    count = histograms[:, 0].sum()
    while count <= rest:
        rest -= count
        count = 0
        for chunk in range(histograms.shape[0]):
            below[chunk] += histograms[chunk, digit]
            count += histograms[chunk, digit + 1]
        digit += 1
    return digit, rest


@njit(nogil=True, cache=True)
def interval(low: Any, shift: Any, digit: int, coarse: Any, last: int) -> tuple[Any, Any, bool]:
    """What a digit tells about a key.

    Args:
        low: the least key that has digit 0.
        shift: bits below the digit.
        digit: the key's.
        coarse: a shift that makes every magnitude less than `last`.
        last: the largest digit, which may stand for all that is above it.

    Returns:
        The least key that has this digit, the shift of the next digit, and whether no other key
        has it, so that there is no next.
    """
    low += np.uint64(digit) << shift
    if digit == last:
        return low, coarse, False
    finer = shift - np.uint64(DIGIT) if shift > DIGIT else np.uint64(0)
    return low, finer, shift == 0


@njit(nogil=True, cache=True)
def write(
    keys: Array, places: Any, threshold: Any, infinity: Any, offset: int, ties: int, chosen: Array
) -> None:
    """Write the indices of keys above the threshold, and of the first `ties` equal to it."""
    at = 0
    for i in range(keys.size):
        if at == chosen.size:
            return
        key = _magnitude(keys[i], infinity)
        tied = key == threshold and ties > 0
        chosen[at] = offset + (i if places is None else places[i])
        at += key > threshold or tied
        ties -= tied


@njit(nogil=True, cache=True)
def select(
    g: Any,
    e: Any,
    bits: Array,
    stream: bool,
    bound: Any,
    shift: Any,
    coarse: Any,
    infinity: Any,
    key: Array,
    place: Array,
    histograms: Array,
    below: Array,
    chosen: Array,
) -> tuple[int, Any]:
    """A whole selection from one chunk, as one call from Python costs as much as many entries.

    Returns:
        The number of candidates, as :func:`collect` does, and the k-th largest magnitude, if there
        are at least as many as are to be chosen.
    """
    histogram, low = histograms[0], np.uint64(bound)
    count = collect(g, e, bits, stream, bound, shift, infinity, key, place, histogram)
    if count < chosen.size:
        return count, low
    rest, keys, exact = count - chosen.size, key[:count], False
    while not exact:
        digit, rest = find_digit(histograms, rest, below)
        low, finer, exact = interval(low, shift, digit, coarse, histogram.size - 1)
        if not exact:
            shift = finer
            count_digits(keys, low, shift, infinity, histogram)
    write(keys, place, low, infinity, 0, histogram[digit] - rest, chosen)
    return count, low
