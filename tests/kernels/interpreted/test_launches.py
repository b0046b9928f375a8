"""Launches and calls with Triton's kernels, interpreted on a simulated device and counted."""

from functools import partial

import pytest
import torch

from tests.support.budgets import WEIGHTS
from tests.support.cases import only
from tests.support.codecs import codec_of
from tests.support.launches import DEVICE, counted, on_device, one_bucket
from tests.support.vectors import normal
from torchcomp.compressors import Quantize, TopK
from torchcomp.engine.keys import Key
from torchcomp.kernels.elementwise_triton import CastSum

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


def launched(compressor, sizes, ranks=8):
    """What the second of two steps with a codec launches: encoding, and a mean."""
    n = sum(sizes)
    with SIMULATED() as count:
        codec = codec_of(compressor, sizes, device=DEVICE)
        g, e, rest, out = (on_device(normal(n)) for _ in range(4))
        rows = on_device(codec.frames.outgoing.cpu().repeat(ranks, 1))
        return of_second(
            count,
            lambda: codec.encode_sum(g, e, rest, Key(0)),
            lambda: codec.encode(g, Key(0)),
            lambda: codec.mean_of(rows, out, Key(0), ranks),
        )


@pytest.mark.parametrize("fmt", [None, "int8"])
@pytest.mark.parametrize("parts", [1, 5])
def test_a_step_with_sparse_messages(fmt, parts):
    sizes = [1000 // parts] * parts
    assert launched(TopK(k=10, values=fmt, scope="tensor"), sizes) == [8, 10, 3]


def test_a_step_with_all_elements():
    assert launched(Quantize("int8"), [1000]) == [1, 1, 1]
    n, ranks = 1000, 8
    with SIMULATED() as count:
        g, e, rest = (on_device(normal(n)) for _ in range(3))
        cast = CastSum(torch.float32, torch.bfloat16, ranks)
        message = on_device(torch.zeros(n, dtype=torch.bfloat16))
        assert of_second(count, lambda: cast.add(g, e, rest, message)) == [1]


@pytest.mark.parametrize("spec", only(WEIGHTS, now=NOW))
def test_a_bucket_costs_at_most_its_budget(spec):
    # A small bucket, which the interpreter needs less time for, launches as much as a large one.
    per_bucket, _ = one_bucket(spec, 8, numel=2**12, simulation=SIMULATED)
    most = WEIGHTS[spec]
    assert per_bucket.waits <= most.waits, per_bucket
    assert per_bucket.copies == 0, per_bucket
    assert 0 < per_bucket.launches <= most.launches, per_bucket
    assert 0 < per_bucket.calls <= most.calls, per_bucket
