"""Replicas stay bit-identical, because every rank decodes the same messages in the same order."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

import torchcomp
from tests.support.cases import only, thorough
from tests.support.models import METHODS, THROUGH_DDP, loss_of, mlp, rows, weights, wrap
from tests.support.outcomes import assert_replicas_equal
from tests.support.ranks import on_processes, on_threads
from torchcomp.aggregators import AGGREGATORS
from torchcomp.compressors import COMPRESSORS


def trained(spec: str, steps: int = 100) -> Tensor:
    model = wrap(mlp(torch.float32))
    handle = torchcomp.register(model, spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model(rows(step, torch.float32))).backward()
        optimizer.step()
    handle.close()
    return weights(model.module)


def two_trained() -> list[Tensor]:
    return [trained("ef(topk(0.1))"), trained('ef(randk(0.1, scope="tensor"))')]


def test_methods_name_everything_that_is_registered() -> None:
    methods = [torchcomp.parse(spec) for spec in METHODS]
    listed = {type(method) for method in methods}
    listed |= {type(getattr(method, field.name)) for method in methods for field in fields(method)}
    missing = {cls.name for cls in (*AGGREGATORS, *COMPRESSORS) if cls not in listed}
    assert not missing, f"add a spec with {missing} to METHODS in tests/support/models.py"


@pytest.mark.parametrize("steps", [20, *thorough([100])])
@pytest.mark.parametrize("spec", only(METHODS, now=THROUGH_DDP))
def test_replicas_are_bit_identical(spec: str, steps: int) -> None:
    outcomes = on_threads(4, trained, spec, steps)
    assert_replicas_equal(outcomes)
    assert outcomes[0].isfinite().all()


def test_replicas_are_bit_identical_over_gloo() -> None:
    for outcomes in zip(*on_processes(3, two_trained), strict=True):
        assert_replicas_equal(list(outcomes))
