"""With budget=1.0 JointSpar trains as plain DDP, bit for bit."""

import pytest
import torch
from torch import nn

from tests.support.models import convolutions, images, loss_of, mlp, rows, seeded, weights, wrap
from tests.support.ranks import on_processes, on_threads
from torchcomp.jointspar import LARS, JointSpar

PLAIN = "plain DDP"
WAYS = ("shared", "per-rank")


def normalised() -> nn.Module:
    layers = (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
    return seeded(nn.Sequential(*layers)).float()


def trained(build, batch, way, optimizer=torch.optim.SGD, **options):
    """Return the weights after 6 steps, of which every second one accumulates gradients."""
    model = wrap(build(), **options)
    jointspar = None if way == PLAIN else JointSpar(model, budget=1.0, selection=way)
    steps = optimizer(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    for step in range(6):
        steps.zero_grad()
        if step % 2:
            with model.no_sync():
                loss_of(model(batch(100 + step))).backward()
        loss_of(model(batch(step))).backward()
        steps.step()
    found = weights(model.module)
    if jointspar is not None:
        assert jointspar.stats.step == 6
        assert jointspar.stats.total_bytes_sent == jointspar.stats.total_dense_bytes_sent
        jointspar.close()
    return found


def float_images(step):
    return images(step).float()


CASES = {
    "mlp": (mlp, rows, {}),
    "one bucket": (mlp, rows, {"bucket_cap_mb": None}),
    "views": (mlp, rows, {"gradient_as_bucket_view": True}),
    "channels_last": (convolutions, images, {}),
    "batch norm": (normalised, float_images, {}),
    "unused": (mlp, rows, {"find_unused_parameters": True}),
}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(("build", "batch", "options"), CASES.values(), ids=CASES)
def test_budget_one_trains_as_plain_ddp(build, batch, options, world_size):
    plain, *others = (
        on_threads(world_size, lambda way=way: trained(build, batch, way, **options))
        for way in (PLAIN, *WAYS)
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


def test_lars_with_budget_one_is_lars():
    def body():
        model = wrap(mlp())
        jointspar = JointSpar(model, budget=1.0)

        def lars(params, **options):
            return LARS(params, trust_coefficient=0.1, **options)

        plain = trained(mlp, rows, PLAIN, lars)
        optimizer = lars(
            model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01, sampled=jointspar
        )
        for step in range(6):
            optimizer.zero_grad()
            if step % 2:
                with model.no_sync():
                    loss_of(model(rows(100 + step))).backward()
            loss_of(model(rows(step))).backward()
            optimizer.step()
        assert torch.equal(weights(model.module), plain)

    on_threads(2, body)


def test_a_smaller_budget_would_fail_the_comparison():
    def body():
        model = wrap(mlp())
        jointspar = JointSpar(model, budget=0.9, warmup_steps=0, seed=1)
        for step in range(6):
            model.zero_grad()
            loss_of(model(rows(step))).backward()
            if any(p.grad is None for p in model.parameters()):
                return True
        return jointspar.stats.total_bytes_sent == jointspar.stats.total_dense_bytes_sent

    assert on_threads(2, body) == [True, True]
