"""Messages of all elements in Triton against plain torch, one step of the reference by another."""

import pytest
import torch

from tests.kernels.definitions import awkward, same
from tests.kernels.interpreted.test_sparse import (
    CPU,
    cases,
    check_frame,
    encoded,
    framed,
    raw,
)
from tests.support.cases import only, thorough
from tests.support.vectors import normal
from torchcomp.kernels import elementwise_triton, quantize
from torchcomp.kernels.cast import narrow, saturate
from torchcomp.kernels.elementwise_triton import DTYPES, CastSum, ElementwiseTriton
from torchcomp.kernels.segments import Segment
from torchcomp.routes.allreduce import _share

# Differences of infinities.
pytestmark = pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning",
    "ignore:overflow encountered:RuntimeWarning",
)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(elementwise_triton, "_ROWS", 2)
    monkeypatch.setattr(elementwise_triton, "_BLOCK", 128)


LENGTHS = {"one": [1001], "several": [1, 0, 127, 128, 129, 300], "short": [3], "wide": [512, 256]}


def segments_of(case):
    segments, start = [], 0
    for n in LENGTHS[case]:
        segments.append(Segment(start, n, n))
        start += n
    return segments, start


def message(x, segments, fmt, dtype, noise=None):
    """Return the bytes of each segment's fields, and each segment's fields."""
    parts = [
        encoded(x[s.span], fmt, dtype, None if noise is None else noise[s.span]) for s in segments
    ]
    return [[byte for field in fields for byte in raw(field)] for fields in parts], parts


def decoded(parts, segments, fmt, dtype):
    """What an all-gather route adds: quantized values in the dtype of the sum, others as sent."""
    to = dtype if fmt in quantize.LEVELS else quantize.CASTS.get(fmt)
    pairs = zip(parts, segments, strict=True)
    values = [quantize.decode([own], [s.n], to or own[0].dtype)[0] for own, s in pairs]
    return torch.cat(values)


@pytest.mark.parametrize("combination", cases("several", LENGTHS), ids=str)
def test_a_step_of_error_feedback(combination):
    case, fmt, dtype, memory = combination
    (segments, numel), gap = segments_of(case), 4 if case == "several" else 5
    for noise in (None, torch.rand(numel))[: 2 if fmt in quantize.LEVELS else 1]:
        g, e = awkward(numel, dtype), normal(numel, dtype=memory, seed=1)
        g[numel // 2 :] = normal(numel - numel // 2, dtype=dtype, seed=2)
        sums = torch.add(g, e, out=torch.empty(numel, dtype=memory))
        fields, parts = message(sums, segments, fmt, dtype, noise)
        offsets, content = framed(fields, gap)
        kernels = ElementwiseTriton(segments, fmt, dtype, CPU, offsets)
        frame, rest = torch.full_like(content, 7), torch.empty(numel, dtype=memory)
        kernels.encode_sum(g, e, rest, frame, noise)
        check_frame(frame, content, segments, offsets, fmt, dtype)
        expected = sums.clone().add_(decoded(parts, segments, fmt, memory), alpha=-1)
        same(rest, expected)
        kernels.encode(sums, frame.fill_(7), noise)
        check_frame(frame, content, segments, offsets, fmt, dtype)
        rest = sums.clone()
        kernels.subtract(frame, rest)
        same(rest, expected)


@pytest.mark.parametrize("combination", cases("wide", LENGTHS), ids=str)
def test_means(combination):
    case, fmt, dtype, to = combination
    (segments, numel), ranks, gap = segments_of(case), 3, 0 if case == "wide" else 5
    rows, parts = [], []
    for rank in range(ranks):
        x = normal(numel, dtype=dtype, seed=rank)
        x[0] = torch.nan if rank == 1 else 0.0
        fields, own = message(x, segments, fmt, dtype)
        offsets, content = framed(fields, gap)
        rows.append(content)
        parts.append(own)
    kernels = ElementwiseTriton(segments, fmt, dtype, CPU, offsets)
    rows = torch.stack(rows)

    out, expected = torch.full((numel,), torch.nan, dtype=to), torch.zeros(numel, dtype=to)
    kernels.mean(rows, out, ranks)
    for own in parts:
        expected.add_(decoded(own, segments, fmt, to))
    same(out, expected.div_(ranks))


CASTS = [(g, w, e) for g in DTYPES for w in quantize.CASTS.values() for e in DTYPES]


@pytest.mark.parametrize("combination", only(CASTS, now=CASTS[::4]), ids=str)
@pytest.mark.parametrize("ranks", [8, *thorough([3])])
def test_a_sum_of_casts(combination, ranks):
    dtype, sent, memory = combination
    n = 500
    g, e = awkward(n, dtype), normal(n, dtype=memory, seed=1)
    g[200:] = normal(300, dtype=dtype, seed=2)
    g[3], g[4], e[5] = torch.finfo(dtype).max, -torch.finfo(dtype).max, 60000.0
    sums = torch.add(g, e, out=torch.empty(n, dtype=memory))
    shares = _share(dtype, ranks), _share(sent, ranks)
    # As AllReduceRoute does.
    x = narrow(sums, dtype, torch.empty(n, dtype=dtype), shares[0])
    x = saturate(x, sent, shares[1]).clone().mul_(1.0 / ranks)
    wanted = narrow(x, sent)
    message, rest = torch.empty(n, dtype=sent), torch.empty(n, dtype=memory)
    kernels = CastSum(dtype, sent, ranks, shares)
    kernels.add(g, e, rest, message)
    same(message, wanted)
    # In float32: torch's `add_` rounds `alpha * wanted` first in the last elements of a vector.
    same(rest, (sums.float() - ranks * wanted.float()).to(memory))

    out = torch.empty(n, dtype=dtype)
    kernels.decode(message, out)
    same(out, torch.empty_like(out).copy_(wanted))
