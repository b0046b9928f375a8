"""Launches and calls with Triton's kernels, interpreted on a simulated device and counted."""

from functools import partial

import pytest
import torch

from tests.support.budgets import WEIGHTS
from tests.support.cases import only
from tests.support.launches import counted, on_device, one_bucket
from tests.support.vectors import normal
from torchcomp.kernels.elementwise_triton import CastSum, ElementwiseTriton
from torchcomp.kernels.segments import Segment
from torchcomp.kernels.sparse_triton import SparseTriton

SIMULATED = partial(counted, triton=True)

NOW = [
    *("mean", 'ef(cast("bf16"))', 'ef(topk(0.01), exchange="allgather")'),
    *("bidirectional(topk(0.01), topk(0.01))", "powersgd(rank=1)"),
    'ef(topk(0.01), exchange="sharded")',
]
"""The methods that `make test` counts."""


def of_second(count, *steps):
    """Run steps twice, and return what each of the second ones launches."""
    for step in steps:
        step()
    numbers = []
    for step in steps:
        count.reset()
        step()
        assert count.waits == 0, count
        numbers.append(count.launches)
    return numbers


@pytest.mark.parametrize("fmt", [None, "int8"])
@pytest.mark.parametrize("parts", [1, 5])
def test_a_step_with_sparse_messages(fmt, parts):
    n, ranks = 1000, 8
    segments = [Segment(n // parts * i, n // parts, 10) for i in range(parts)]
    with SIMULATED() as count:
        kernels = SparseTriton(segments, n, fmt, torch.float32, torch.device("cuda", 0))
        g, e, rest, out = (on_device(normal(n)) for _ in range(4))
        frame, rows = (on_device(torch.zeros(s, dtype=torch.uint8)) for s in (8000, (ranks, 8000)))
        launched = of_second(
            count,
            lambda: kernels.encode_sum(g, e, rest, frame),
            lambda: kernels.add_and_select(g, e, rest),
            lambda: kernels.mean(rows, out, ranks),
        )
    assert launched == [8, 7, 3]


def test_a_step_with_all_elements():
    n, ranks = 1000, 8
    with SIMULATED() as count:
        device = torch.device("cuda", 0)
        kernels = ElementwiseTriton([Segment(0, n, n)], "int8", torch.float32, device)
        g, e, rest, out = (on_device(normal(n)) for _ in range(4))
        frame, rows = (on_device(torch.zeros(s, dtype=torch.uint8)) for s in (4000, (ranks, 4000)))
        cast = CastSum(torch.float32, torch.bfloat16, ranks)
        message = on_device(torch.zeros(n, dtype=torch.bfloat16))
        launched = of_second(
            count,
            lambda: kernels.encode_sum(g, e, rest, frame),
            lambda: kernels.encode(g, frame),
            lambda: kernels.mean(rows, out, ranks),
            lambda: cast.add(g, e, rest, message),
            lambda: cast.decode(message, out),
        )
    assert launched == [1] * 5


@pytest.mark.parametrize("spec", only(WEIGHTS, now=NOW))
def test_a_bucket_costs_at_most_its_budget(spec):
    # A small bucket, which the interpreter needs less time for, launches as much as a large one.
    per_bucket, _ = one_bucket(spec, 8, numel=2**12, simulation=SIMULATED)
    most = WEIGHTS[spec]
    assert per_bucket.waits <= most.waits, per_bucket
    assert per_bucket.copies == 0, per_bucket
    assert 0 < per_bucket.launches <= most.launches, per_bucket
    assert 0 < per_bucket.calls <= most.calls, per_bucket.called
