"""Whole trainings with the forms for accelerators end in the bits of those with Numba."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import torchcomp
from tests.support.cases import only
from tests.support.models import METHODS, THROUGH_DDP, loss_of, mlp, rows, seeded, weights, wrap
from tests.support.outcomes import same
from tests.support.ranks import on_threads
from torchcomp.kernels import backend

STEPS = 5
MORE = (
    "topk(0.1)",
    'ef(topk(0.1, values="int8"))',
    'ef(quantize("int8"))',
    "bidirectional(topk(0.1), topk(0.1))",
    'bidirectional(topk(0.2, values="int4", rounding="stochastic"), topk(0.2, values="bf16"))',
)


Outcome = tuple[torch.Tensor, dict[str, Any], int]


@contextlib.contextmanager
def device_forms() -> Iterator[None]:
    """Run the forms for accelerators, in plain torch, on tensors of the CPU."""
    with (
        mock.patch("torchcomp.engine.host.can_read", return_value=False),
        backend.plain_torch("cpu"),
    ):
        yield


def train(spec: str, dtype: torch.dtype) -> Outcome:
    """Train on this rank. Return the weights, the state and the bytes that were sent."""
    model = wrap(seeded(mlp(dtype)))
    handle = torchcomp.register(model, spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model(rows(step, dtype))).backward()
        optimizer.step()
    state = handle.state_dict()
    handle.close()
    if '"exact"' in spec:
        # On an accelerator, the search for the entries of a downlink sends other messages.
        del state["traffic"]
        return weights(model), state, 0
    return weights(model), state, handle.stats.total_bytes_sent


@pytest.mark.parametrize("dtype", [torch.float32, *only([torch.bfloat16, torch.float64], now=[])])
@pytest.mark.parametrize("spec", only(METHODS, now=THROUGH_DDP + MORE))
def test_the_bits_are_those_of_the_forms_for_the_cpu(spec: str, dtype: torch.dtype) -> None:
    pytest.importorskip("numba", reason='needs pip install "torchcomp-ddp[kernels]"')
    host = on_threads(2, train, spec, dtype)
    # Once around both ranks: the threads share the forms.
    with device_forms():
        assert same(host, on_threads(2, train, spec, dtype))


def test_the_forms_differ() -> None:
    """The comparison above is not of a form with itself."""
    with (
        device_forms(),
        mock.patch("torchcomp.kernels.elias_fano.encode", side_effect=RuntimeError("of a device")),
        pytest.raises(RuntimeError, match="of a device"),
    ):
        on_threads(2, train, "ef(topk(0.1))", torch.float32)
