"""Selection in Triton against the specification, a stable sort."""

import pytest
import torch
from triton.runtime import interpreter

from tests.kernels.forms import sparse_kernels
from tests.kernels.interpreted.test_steps import triton_on_the_cpu
from tests.kernels.test_select import awkward, drift, sorted_out
from tests.support.cases import only, some, thorough
from tests.support.vectors import normal
from torchcomp.kernels import sparse_triton
from torchcomp.kernels.segments import Segment
from torchcomp.kernels.select import Scratch
from torchcomp.kernels.select_triton import DTYPES, SUMS, select, select_all


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Make short vectors use several blocks: the interpreter is slow."""
    for name, size in {"_BLOCK": 256, "_COUNTED": 256, "_CHUNK": 64, "_SAMPLE": 512}.items():
        monkeypatch.setattr(sparse_triton, name, size)


def ks(n):
    return sorted({k for k in (1, n // 50, n // 3, n - 1) if 0 < k < n})


@pytest.mark.parametrize("dtype", some(DTYPES, of=2))
@pytest.mark.parametrize("n", [2, 65, *thorough([600, 3000])])
def test_awkward_numbers(n, dtype):
    x = awkward(n, dtype)
    for k in ks(n):
        scratch = Scratch()
        for _ in range(2):  # from a sample, and from the last threshold
            chosen = select(x, k, scratch, None)
            assert chosen.dtype == torch.int64
            assert torch.equal(chosen, sorted_out(x, k)), k


@pytest.mark.parametrize("dtype", some(DTYPES, of=3))
@pytest.mark.parametrize("n", [600, *thorough([65, 3000])])
def test_sums(n, dtype):
    g, e, out = awkward(n, dtype), normal(n, seed=1), torch.empty(n)
    assert (dtype, e.dtype, out.dtype) in SUMS
    for k in ks(n):
        chosen = select(out.fill_(7.0), k, Scratch(), (g, e))
        torch.testing.assert_close(out, g + e, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(chosen, sorted_out(g + e, k)), k


@pytest.mark.parametrize("value", [torch.nan, *thorough([0.0, -3.0, torch.inf, -0.0, 1e-45])])
def test_among_equals_the_lowest_indices_win(value):
    x = torch.full((600,), value)
    for k in (1, 300, 599):
        assert torch.equal(select(x, k, Scratch(), None), torch.arange(k))


@pytest.mark.parametrize("k", [10, *thorough([1000])])
def test_a_vector_mostly_of_zeros(k):
    x = torch.zeros(3000)
    x[::100] = normal(30)
    assert torch.equal(select(x, k, Scratch(), None), sorted_out(x, k))


def test_all_of_the_largest_in_one_block():
    x = normal(2000)
    x[512:768] *= 1e6
    scratch = Scratch()
    for _ in range(2):
        assert torch.equal(select(x, 256, scratch, None), sorted_out(x, 256))


INFINITY = 0x7F800000
BOUNDS = {  # a threshold and a margin
    "zero": (0, 0),
    "negative": (0, 1 << 26),
    "denormal": (1, 0),
    "too low": (0x3C000000, 1 << 13),
    "too high": (0x41000000, 1 << 13),
    "infinity": (INFINITY, 0),
    "above infinity": (2**31 - 1, 0),
}


@pytest.mark.parametrize("bound", only(BOUNDS, now=["too low"]))
def test_no_bound_changes_the_result(bound):
    n, scratch = 700, Scratch()
    x = normal(n)
    for k in (10, 300):  # at 10, most candidates of a low bound do not fit
        expected = sorted_out(x, k)
        select(x, k, scratch, None)
        scratch.kept.kernels._bound.copy_(torch.tensor(BOUNDS[bound]))
        for _ in range(2):
            assert torch.equal(select(x, k, scratch, None), expected)
        # Whatever the bound was, the threshold of this step is the next one's.
        threshold = x.abs()[expected].min().view(torch.int32)
        assert int(scratch.kept.kernels._bound[0]) == int(threshold)


def test_the_margin_grows_when_there_were_too_few_candidates_and_shrinks_after_too_many():
    x, margins, scratch = normal(700), [], Scratch()
    for scale in (1.0, 0.25, 4.0):
        select(x * scale, 50, scratch, None)
        margins.append(int(scratch.kept.kernels._bound[1]))
    assert margins[1] == 4 * margins[0]
    assert margins[2] < margins[1]


def test_step_after_step():
    n, scratch = 900, Scratch()
    for g, e, out in drift(n, 3):
        assert torch.equal(select(out, n // 100, scratch, (g, e)), sorted_out(g + e, n // 100))


def test_one_scratch_for_different_vectors():
    scratch = Scratch()
    for n, dtype in [(300, torch.float32), (703, torch.float16), (70, torch.bfloat16)] * 2:
        x = awkward(n, dtype)
        assert torch.equal(select(x, n // 7, scratch, None), sorted_out(x, n // 7))


def test_a_scratch_of_another_form():
    scratch = Scratch()
    scratch.kept = "another form's"
    x = normal(300)
    assert torch.equal(select(x, 30, scratch, None), sorted_out(x, 30))


def test_float64_is_left_to_another_form():
    assert torch.float64 not in DTYPES


# --- Several segments -----------------------------------------------------------------------------

SEGMENTS = {
    "shards": [(0, 256, 3), (256, 256, 3), (512, 255, 2), (767, 255, 2)],
    "uneven": [(0, 1, 1), (1, 1300, 13), (1301, 2, 1), (1303, 300, 200)],
    "all and none": [(0, 300, 300), (300, 300, 0), (600, 7, 7), (607, 400, 4)],
    "with gaps": [(16, 512, 5), (1024, 64, 6)],
    "none": [(0, 300, 0)],
}


def segments_of(case):
    return [Segment(*numbers) for numbers in SEGMENTS[case]]


def each_sorted_out(x, segments):
    chosen = [sorted_out(x[segment.span], segment.k) + segment.start for segment in segments]
    return torch.cat(chosen)


@pytest.mark.parametrize("dtype", [torch.float32, *thorough([torch.bfloat16])])
@pytest.mark.parametrize("case", only(SEGMENTS, now=["uneven", "all and none"]))
def test_segments(case, dtype):
    segments, scratch = segments_of(case), Scratch()
    x = awkward(segments[-1].span.stop, dtype)
    for _ in range(2):
        chosen = select_all(x, segments, scratch, None)
        assert chosen.dtype == torch.int64
        assert torch.equal(chosen, each_sorted_out(x, segments))


def test_segments_of_different_scales_have_a_bound_each():
    segments, scratch = segments_of("uneven"), Scratch()
    for step in range(2):
        g, e = normal(1603, seed=step), normal(1603, seed=9)
        g[1301:] *= 1e6
        out = torch.empty(1603)
        chosen = select_all(out, segments, scratch, (g, e))
        assert torch.equal(out, g + e)
        assert torch.equal(chosen, each_sorted_out(out, segments))


@pytest.mark.parametrize("case", only(SEGMENTS, now=["all and none"]))
def test_segments_as_the_methods_select_them(case):
    segments = segments_of(case)
    n = segments[-1].span.stop
    g, e, out = awkward(n, torch.float32), normal(n, seed=1), torch.empty(n)
    with triton_on_the_cpu():
        kernels = sparse_kernels(*segments)
        for _ in range(2):
            chosen = kernels.add_and_select(g, e, out.fill_(7.0))
            for segment in segments:
                own = segment.span
                torch.testing.assert_close(out[own], (g + e)[own], rtol=0, atol=0, equal_nan=True)
            assert torch.equal(chosen, each_sorted_out(g + e, segments))
            assert torch.equal(kernels.select(g), each_sorted_out(g, segments))


def test_the_number_of_launches_does_not_depend_on_the_number_of_segments(monkeypatch):
    launched = []
    run = interpreter.GridExecutor.__call__
    count = lambda self, *args, **options: launched.append(self) or run(self, *args, **options)  # noqa: E731
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", count)
    numbers = []
    for parts in (1, 5):
        select_all(normal(500), [Segment(100 * i, 100, 9) for i in range(parts)], Scratch(), None)
        numbers.append(len(launched))
        launched.clear()
    assert numbers[0] == numbers[1] == 8
