"""Whole steps of methods with Triton's kernels, from gradients to means and residuals."""

import contextlib
from unittest import mock

import pytest
import torch

from tests.support.cases import only
from tests.support.outcomes import same
from torchcomp import Averager, run_in_process
from torchcomp.kernels import backend

SHAPES = {"weight": (60, 40), "bias": (77,)}
RANKS = 2
METHODS = [
    'ef(topk(0.05), exchange="allgather")',
    "bidirectional(topk(0.05), topk(0.05))",
    *only(
        [
            'ef(topk(0.05, values="int8"), exchange="allgather")',
            'ef(topk(0.05), exchange="sharded")',
            'ef(topk(0.05, scope="tensor", values="int4"), exchange="allgather")',
            'bidirectional(topk(0.05), topk(0.05), selection="exact")',
            'ef(quantize("int4"))',
            'quantize("int8", rounding="stochastic")',
            'ef21(topk(0.05), exchange="allgather")',
        ],
        now=[],
    ),
]


def steps(method, dtype):
    """Return the means and the states of all ranks after three steps."""

    def body(exchange):
        draws = torch.Generator().manual_seed(exchange.rank)
        like = {name: torch.empty(shape, dtype=dtype) for name, shape in SHAPES.items()}
        averager, means = Averager(method, exchange, like), []
        for _ in range(3):
            tensors = {name: torch.randn(s, generator=draws) for name, s in SHAPES.items()}
            tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
            averager.average_all(tensors)
            means.append(tensors)
        state = averager.state_dict()
        if '"exact"' in method:
            # On an accelerator, the search for the entries of a downlink sends other messages.
            del state["traffic"]
        return means, state

    return run_in_process(RANKS, body)


@contextlib.contextmanager
def triton_on_the_cpu():
    backend.fast_form.cache_clear()
    with (
        mock.patch.dict(backend._LIBRARY, cpu="triton"),
        mock.patch("torchcomp.engine.host.can_read", return_value=False),
    ):
        yield
    backend.fast_form.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, *only([torch.bfloat16], now=[])])
@pytest.mark.parametrize("method", METHODS)
def test_the_bits_are_those_of_the_host(method, dtype):
    expected = steps(method, dtype)
    with triton_on_the_cpu():
        forms = [backend.fast_form(stem, "cpu") for stem in ("sparse", "elementwise", "counted")]
        assert all(form.__name__.endswith("_triton") for form in forms)
        found = steps(method, dtype)
        # A kernel that failed would have been replaced by plain torch.
        assert "cpu" not in backend._failed
    assert same(found, expected)
