"""With budget=1.0 JointSpar trains as plain DDP, bit for bit."""

import pytest
import torch
from torch import nn

from tests.support.cases import only
from tests.support.models import convolutions, images, loss_of, mlp, rows, seeded, weights, wrap
from tests.support.ranks import on_processes, on_threads
from torchcomp.jointspar import LARS, JointSpar

PLAIN = "plain DDP"
WAYS = ("shared", "per-rank")


def normalised() -> nn.Module:
    layers = (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
    return seeded(nn.Sequential(*layers)).double()


def trained(build, batch, way, lars=False, budget=1.0, **options):
    """Return the weights after 6 steps, of which every second one accumulates gradients."""
    model = wrap(build(), **options)
    jointspar = None if way == PLAIN else JointSpar(model, budget=budget, selection=way)
    common = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
    if lars:
        optimizer = LARS(model.parameters(), trust_coefficient=0.1, sampled=jointspar, **common)
    else:
        optimizer = torch.optim.SGD(model.parameters(), **common)
    for step in range(6):
        optimizer.zero_grad()
        if step % 2:
            with model.no_sync():
                loss_of(model(batch(100 + step))).backward()
        loss_of(model(batch(step))).backward()
        optimizer.step()
    if jointspar is not None:
        assert jointspar.stats.steps == 6
        if budget == 1:
            assert jointspar.stats.total_bytes_sent == jointspar.stats.total_dense_bytes_sent
        jointspar.close()
    return weights(model.module)


CASES = {
    "mlp": (mlp, rows, {}),
    "one bucket": (mlp, rows, {"bucket_cap_mb": None}),
    "views": (mlp, rows, {"gradient_as_bucket_view": True}),
    "channels_last": (convolutions, images, {}),
    "batch norm": (normalised, images, {}),
    "unused": (mlp, rows, {"find_unused_parameters": True}),
    "lars": (mlp, rows, {"lars": True}),
}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("case", only(CASES, now=["mlp", "views", "batch norm", "lars"]))
def test_budget_one_trains_as_plain_ddp(case, world_size):
    build, batch, options = CASES[case]
    ways = (PLAIN, "shared") if options.get("lars") else (PLAIN, *WAYS)
    plain, *others = (
        on_threads(world_size, lambda way=way: trained(build, batch, way, **options))
        for way in ways
    )
    assert not torch.equal(plain[0], weights(build()))
    for found in others:
        for mine, expected in zip(found, plain, strict=True):
            assert torch.equal(mine, expected)


def all_ways():
    return {way: trained(mlp, rows, way) for way in (PLAIN, *WAYS)}


def test_budget_one_trains_as_plain_ddp_over_gloo():
    for outcome in on_processes(3, all_ways):
        for way in WAYS:
            assert torch.equal(outcome[way], outcome[PLAIN])


def test_a_smaller_budget_would_fail_the_comparison():
    plain, sampled = (
        on_threads(2, lambda way=way: trained(mlp, rows, way, budget=0.9))[0]
        for way in (PLAIN, "shared")
    )
    assert not torch.equal(plain, sampled)
