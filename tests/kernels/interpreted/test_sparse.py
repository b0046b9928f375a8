"""Sparse messages in Triton against plain torch, one step of the reference after another."""

import numpy as np
import pytest
import torch

from tests.kernels.definitions import awkward, is_code, same, some_of, sorted_out, specified
from tests.support.cases import only, thorough
from tests.support.vectors import normal
from torchcomp.kernels import quantize
from torchcomp.kernels.cast import narrow
from torchcomp.kernels.elias_fano import nbytes
from torchcomp.kernels.segments import Segment
from torchcomp.kernels.sparse_triton import DTYPES, SparseTriton
from torchcomp.kernels.table_triton import SIZES

CPU = torch.device("cpu")
FORMATS = [None, *quantize.FORMATS]


# Differences of infinities.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Make short vectors use several blocks: the interpreter is slow."""
    sizes = {"block": 512, "count": 256, "chunk": 128, "group": 2, "sample": 512, "fill": 128}
    for name, size in {**sizes, "bit": 32, "decode": 128, "tile": 512, "part": 256}.items():
        monkeypatch.setitem(SIZES, name, size)


# --- The reference --------------------------------------------------------------------------------


def encoded(values, fmt, dtype, noise=None):
    """The fields of values."""
    return quantize.encode(narrow(values, dtype), [values.numel()], fmt, noise)[0]


def decoded(fields, count, dtype):
    return quantize.decode([fields], [count], dtype)[0]


def chosen(x, segments):
    parts = [sorted_out(x[s.span], s.k) + s.start for s in segments if s.k]
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts])


def raw(tensor):
    return tensor.contiguous().view(torch.uint8).tolist()


def message(x, index, segments, fmt, dtype, noise=None):
    """Return the bytes of each segment's fields, and what the receivers decode."""
    fields, values, first = [], [], 0
    for segment in segments:
        own = index[first : first + segment.k]
        drawn = None if noise is None else noise[first : first + segment.k]
        parts = encoded(x[own], fmt, dtype, drawn)
        local = (own - segment.start).tolist()
        fields.append([byte for part in parts for byte in raw(part)] + specified(local, segment.n))
        values.append(decoded(parts, segment.k, x.dtype))
        first += segment.k
    return fields, torch.cat([torch.empty(0, dtype=x.dtype), *values])


def framed(fields, gap=5, begin=16):
    """Place fields in a frame; return their offsets and the bytes."""
    offsets, content = [], [7] * begin
    for own in fields:
        offsets.append(len(content))
        content += own + [7] * gap
    content += [7] * (-len(content) % 8)
    return offsets, torch.tensor(content, dtype=torch.uint8)


def offsets_of(segments, fmt, dtype, gap=5):
    sizes = [
        sum(field.nbytes for field in quantize.layout(fmt, s.k, dtype)) + nbytes(s.n, s.k)
        for s in segments
    ]
    return framed([[0] * size for size in sizes], gap)


def less(x, index, values):
    """Subtract finite values from a copy of `x`."""
    x = x.clone()
    x[index] = torch.where(values.isfinite(), x[index] - values, x[index])
    return x


SEGMENTS = {
    "one": [(0, 1000, 10)],
    "shards": [(0, 256, 3), (256, 256, 3), (512, 255, 2), (767, 255, 2)],
    "uneven": [(0, 1, 1), (1, 1300, 13), (1301, 2, 1), (1303, 300, 200)],
    "all, none and gaps": [(3, 300, 300), (303, 300, 0), (603, 0, 0), (610, 7, 7), (617, 400, 4)],
    "bitmap": [(0, 700, 300)],
    "none": [(0, 300, 0)],
}


def segments_of(case):
    return [Segment(*numbers) for numbers in SEGMENTS[case]]


# --- Encoding -------------------------------------------------------------------------------------


def cases(usual, names):
    """All formats and dtypes with the usual segments, of which `make test` runs few; few others."""
    every = [(fmt, g, e) for fmt in FORMATS for g in DTYPES for e in DTYPES]
    usually, now = ([(usual, *each) for each in some] for some in (every, every[::7]))
    others = [(name, *each) for name in names if name != usual for each in every[::13]]
    return [*only(usually, now=now), *thorough(others)]


@pytest.mark.parametrize("combination", cases("uneven", SEGMENTS), ids=str)
def test_a_step_of_error_feedback(combination):
    case, fmt, dtype, memory = combination
    segments = segments_of(case)
    numel = segments[-1].span.stop + 9
    offsets, _ = offsets_of(segments, fmt, dtype)
    kernels = SparseTriton(segments, numel, fmt, dtype, CPU, offsets)
    for step in range(2):
        g, e = awkward(numel, dtype), normal(numel, dtype=memory, seed=step)
        g[20], g[21], e[30] = torch.nan, -torch.inf, 3.0
        sums = torch.add(g, e, out=torch.empty(numel, dtype=memory))
        wanted = chosen(sums, segments)
        noise = torch.rand(len(wanted)) if fmt in quantize.LEVELS and step else None
        fields, values = message(sums, wanted, segments, fmt, dtype, noise)
        _, content = framed(fields)
        frame, rest = torch.full_like(content, 7), torch.empty(numel, dtype=memory)
        index = kernels.encode_sum(g, e, rest, frame, noise)
        assert index.equal(wanted)
        check_frame(frame, content, segments, offsets, fmt, dtype)
        same(rest, less(sums, wanted, values))

        other, rest = torch.full_like(content, 7), sums.clone()
        assert kernels.encode(rest, index, other, noise) is None
        check_frame(other, content, segments, offsets, fmt, dtype)
        kernels.subtract(frame, index, rest)
        same(rest, less(sums, wanted, values))
        rest = sums.clone()
        kernels.subtract(frame, index, rest, -3.0)
        same(rest, less(sums, wanted, values * -3))


def check_frame(frame, content, segments, offsets, fmt, dtype):
    """Compare bytes; of plain values, NaN can have other bits."""
    if fmt not in quantize.LEVELS:
        for segment, offset in zip(segments, offsets, strict=True):
            (field,) = quantize.layout(fmt, segment.k, dtype)
            end = offset + field.nbytes
            got, wanted = (x[offset:end].clone().view(field.dtype) for x in (frame, content))
            same(got, wanted)
            frame, content = frame.clone(), content.clone()
            frame[offset:end] = content[offset:end] = 0
    assert frame.equal(content)


BOUNDS = {  # a threshold and a margin
    "zero": (0, 0),
    "negative": (0, 1 << 26),
    "denormal": (1, 0),
    "too low": (0x3C000000, 1 << 13),
    "too high": (0x41000000, 1 << 13),
    "infinity": (0x7F800000, 0),
    "above infinity": (2**31 - 1, 0),
}


@pytest.mark.parametrize("bound", only(BOUNDS, now=["too low", "too high"]))
def test_no_bound_changes_the_result(bound):
    n = 1400
    x = normal(n)
    for k in (10, 300):  # at 10, most candidates of a low bound do not fit
        kernels = SparseTriton([Segment(0, n, k)], n, None, torch.float32, CPU)
        expected = sorted_out(x, k)
        kernels.select(x)
        kernels._selecting._bound.copy_(torch.tensor(BOUNDS[bound]))
        for _ in range(2):
            assert kernels.select(x).equal(expected)
        # Whatever the bound was, the threshold of this step is the next one's.
        assert int(kernels._selecting._bound[0]) == int(x.abs()[expected].min().view(torch.int32))


def test_after_a_step_that_did_not_end():
    x = normal(600)
    kernels = SparseTriton([Segment(0, 600, 9)], 600, None, torch.float32, CPU)
    kernels.select(x)
    write = kernels._selecting._launches["select", False, False].pop()
    with pytest.raises(TypeError, match="DONE"):
        kernels.select(x)
    kernels._selecting._launches["select", False, False].append(write)
    kernels._selecting._counters.fill_(5)
    kernels._selecting._clean = False
    assert kernels.select(x).equal(sorted_out(x, 9))


# --- Decoding -------------------------------------------------------------------------------------


def received(segments, fmt, dtype, ranks, gap):
    """Return kernels, the rows of all ranks, and by rank the indices and the values."""
    numel = segments[-1].span.stop + 9
    rows, index, values = [], [], []
    for rank in range(ranks):
        x = normal(numel, dtype=dtype, seed=rank)
        if rank == 1 and fmt not in quantize.LEVELS:
            x[segments[-1].start] = torch.inf
        own = [some_of(s.n, s.k, rank + i) + s.start for i, s in enumerate(segments) if s.k]
        index.append(torch.cat([torch.empty(0, dtype=torch.int64), *own]))
        fields, _ = message(x, index[-1], segments, fmt, dtype)
        first, decoded_values = 0, {}
        for out_dtype in DTYPES:
            decoded_values[out_dtype] = []
        for s in segments:
            parts = encoded(x[index[-1][first : first + s.k]], fmt, dtype)
            for out_dtype, each in decoded_values.items():
                each.append(decoded(parts, s.k, out_dtype))
            first += s.k
        values.append({d: torch.cat(each) for d, each in decoded_values.items()})
        offsets, content = framed(fields, gap)
        rows.append(content)
    kernels = SparseTriton(segments, numel, fmt, dtype, CPU, offsets)
    return kernels, torch.stack(rows), index, values


def added(out, index, values):
    for at, each in zip(index, values, strict=True):
        out[at] = out[at] + each[out.dtype]
    return out


@pytest.mark.parametrize("combination", cases("uneven", SEGMENTS), ids=str)
def test_means(combination):
    case, fmt, dtype, to = combination
    segments, ranks, gap = segments_of(case), 3, 0 if case == "uneven" else 5
    kernels, rows, index, values = received(segments, fmt, dtype, ranks, gap)
    numel = segments[-1].span.stop + 9
    out = torch.full((numel,), torch.nan, dtype=to)
    kernels.mean(rows, out, ranks)
    same(out, added(torch.zeros(numel, dtype=to), index, values).div_(ranks))


def test_rows_that_are_not_aligned():
    segments = segments_of("one")
    kernels, rows, index, values = received(segments, None, torch.float32, 2, 0)
    memory = torch.zeros(2, rows.shape[1] + 7, dtype=torch.uint8)
    memory[:, 3 : 3 + rows.shape[1]] = rows
    out = torch.empty(segments[-1].span.stop + 9)
    kernels.mean(memory[:, 3 : 3 + rows.shape[1]], out, 2)
    same(out, added(torch.zeros_like(out), index, values).div_(2))


@pytest.mark.parametrize("ranks", [1, 2, 5, *thorough([64])])
def test_any_number_of_messages(ranks):
    segments = [Segment(0, 300, 30)]
    kernels, rows, index, values = received(segments, None, torch.float32, ranks, 0)
    out = torch.empty(309)
    kernels.mean(rows, out, ranks)
    same(out, added(torch.zeros(309), index, values).div_(ranks))


# --- Index codes ----------------------------------------------------------------------------------


def damaged(n, k, generator):
    length = nbytes(n, k)
    code = np.array(specified(some_of(n, k).tolist(), n), dtype=np.uint8)
    for flips in [1, 2] * 6:
        raw = code.copy()
        for bit in generator.integers(0, 8 * length, flips):
            raw[bit // 8] ^= 1 << bit % 8
        yield raw
    for density in (0.1, 0.3, 0.5, 0.9):
        yield np.packbits(generator.random(8 * length) < density)
    yield np.zeros(length, np.uint8)
    yield np.full(length, 255, np.uint8)
    yield np.array(specified(some_of(n, k, 1).tolist(), n), dtype=np.uint8)  # of other indices


CODES = [(40, 2), (64, 9), (100, 60), (1000, 10), (2000, 100)]


@pytest.mark.parametrize("code", only(CODES, now=[(40, 2), (1000, 10)]), ids=str)
def test_damage_is_found(code):
    n, k = code
    segments = [Segment(0, 50, 5), Segment(50, n, k), Segment(50 + n, 50, 5)]
    kernels, rows, index, values = received(segments, None, torch.float32, 2, 1)
    begin = kernels._table.rows[1, 16]
    expected, verdicts = added(torch.zeros(109 + n), index, values).div_(2), []
    for content in damaged(n, k, np.random.default_rng(n)):
        broken = rows.clone()
        broken[1, begin : begin + len(content)] = torch.tensor(content)
        out = torch.empty(109 + n)
        kernels.mean(broken, out, 2)
        intact = is_code(content, n, k)
        if intact:
            assert out[:50].equal(expected[:50])
        else:
            assert out.isnan().all()
        verdicts.append(bool(out[0].isnan()))
    assert any(verdicts)
    assert not all(verdicts)


@pytest.mark.parametrize(
    ("indices", "n"),
    [
        ([10, 10, 300, 999], 1000),
        ([11, 10, 300, 999], 1000),
        ([1, 2, 3, 1000], 1000),  # their high parts fit, as 1000 is not a multiple of 2^l
        ([0, 1, 2, 3, 4, 12], 12),  # a bitmap
    ],
)
def test_indices_that_do_not_ascend_below_n_are_found(indices, n):
    code = specified(indices, n)
    assert len(code) == nbytes(n, len(indices))
    assert not is_code(code, n, len(indices))
    kernels = SparseTriton([Segment(0, n, len(indices))], n, None, torch.float32, CPU)
    content = raw(torch.ones(len(indices))) + code
    frame = torch.tensor(content + [0] * (-len(content) % 4), dtype=torch.uint8)
    out = torch.empty(n)
    kernels.mean(frame[None], out, 1)
    assert out.isnan().all()
