"""Methods that send everything give the same weights as plain DDP."""

import pytest
import torch
from torch import Tensor

import torchcomp
from tests.support.cases import thorough
from tests.support.models import loss_of, mlp, rebuilt_buckets, rows, weights, wrap
from tests.support.ranks import on_processes, on_threads

SUMMED = ("mean", "identity")
GATHERED = ("topk(1.0)", "ef(topk(1.0))")
PLAIN = ""


def trained(spec: str) -> Tensor:
    """Return the weights after 10 steps of SGD. DDP rebuilds its buckets in the second step."""
    model = wrap(mlp())
    handle = torchcomp.register(model, spec) if spec else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(10):
        optimizer.zero_grad()
        loss_of(model(rows(step))).backward()
        optimizer.step()
    assert rebuilt_buckets(model) > 2
    if handle is not None:
        handle.close()
    return weights(model.module)


def all_trained() -> dict[str, Tensor]:
    return {spec: trained(spec) for spec in (PLAIN, *SUMMED, *GATHERED)}


@pytest.mark.parametrize("world_size", [3, *thorough([2, 4])])
def test_over_gloo_a_method_that_sends_everything_equals_plain_ddp(world_size: int) -> None:
    for outcome in on_processes(world_size, all_trained):
        plain = outcome[PLAIN]
        assert not torch.equal(plain, weights(mlp()))
        for spec in SUMMED:
            assert torch.equal(outcome[spec], plain), spec
        for spec in GATHERED:
            # Two summands have one order of addition, so even the bits are equal.
            if world_size == 2:
                assert torch.equal(outcome[spec], plain), spec
            torch.testing.assert_close(outcome[spec], plain, rtol=0, atol=1e-12)


def test_on_one_rank_a_method_that_sends_everything_equals_plain_ddp() -> None:
    outcome = on_threads(1, all_trained)[0]
    for spec in (*SUMMED, *GATHERED):
        assert torch.equal(outcome[spec], outcome[PLAIN]), spec
