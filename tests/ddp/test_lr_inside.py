"""register(..., lr_inside=optimizer): the residual in the unit of the update, through DDP.

tests/engine/test_lr_inside.py compares the method itself with the thesis's.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchcomp
from tests.support.cases import thorough
from tests.support.models import kept, optimizer_step, weights, wrap
from tests.support.outcomes import assert_close, caught
from tests.support.patience import PATIENCE
from tests.support.ranks import on_processes, on_threads
from torchcomp import RankFailureError, SpecError


class Linear(nn.Module):
    """Two vectors, whose gradients are the inputs: all updates are then known beforehand."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(30, dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros(20, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([self.a, self.b]) @ inputs


def inputs(step: int) -> Tensor:
    noise = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(50, generator=noise, dtype=torch.float64)


class Run:
    """Training with two parameter groups and a learning rate that falls in every step."""

    def __init__(self, scaler: Any = None, **options: Any) -> None:
        self.model, self.scaler = wrap(Linear()), scaler
        groups = [{"params": [self.model.module.a]}, {"params": [self.model.module.b], "lr": 0.5}]
        self.optimizer = torch.optim.SGD(groups, lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        options |= {"lr_inside": self.optimizer, "scaler": scaler}
        self.handle = torchcomp.register(self.model, "ef(topk(0.2))", **options)
        self.expected = torch.zeros(50, dtype=torch.float64)  # of dense training, on this rank

    def step(self, step: int, accumulates: bool = False, overflows: bool = False) -> None:
        a, b = (group["lr"] for group in self.optimizer.param_groups)
        lrs = torch.tensor([a] * 30 + [b] * 20, dtype=torch.float64)
        self.optimizer.zero_grad()
        if accumulates:
            with self.model.no_sync():
                self.model(inputs(10 + step)).backward()
            self.expected -= lrs * inputs(10 + step)
        loss = self.model(inputs(step) / (0.0 if overflows and dist.get_rank() else 1.0))
        if not overflows:
            self.expected -= lrs * inputs(step)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        optimizer_step(self.optimizer, self.scaler)
        self.scheduler.step()

    def unsent(self) -> Tensor:
        """This rank's residual in the unit of the update; its mean over the ranks is unsent."""
        error, units = kept(self.handle.state_dict()), self.handle.averager.units
        return torch.cat([units.lrs[name] * error[name] for name in ("a", "b")]) / units.scale


OPTIONS: dict[str, tuple[dict[str, Any], Any]] = {
    "late": ({"check": "late"}, lambda step: {}),
    "accumulated": ({}, lambda step: {"accumulates": True}),
    "a step that the scaler skips": ({}, lambda step: {"overflows": step == 3}),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_weights_and_residual_are_what_dense_training_applies(case: str) -> None:
    def body() -> tuple[Tensor, Tensor, Tensor]:
        options, of_step = OPTIONS[case]
        if "scaler" in case:
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
            options = {"scaler": scaler}
        run = Run(**options)
        for step in range(8):
            before = weights(run.model)
            run.step(step, **of_step(step))
            assert torch.equal(before, weights(run.model)) == bool(of_step(step).get("overflows"))
        return weights(run.model), run.unsent(), run.expected

    outcomes = on_threads(2, body)
    left = sum(unsent for _, unsent, _ in outcomes) / 2
    assert left.abs().max() > 0.01
    # w = w_0 - the sum of lr * mean g, plus what has not been sent.
    assert_close(outcomes[0][0] - left, sum(expected for *_, expected in outcomes) / 2)


def test_several_optimizers_train_the_parts_of_a_model() -> None:
    def body() -> dict[str, float]:
        model = wrap(Linear())
        parts = zip((0.1, 0.2), model.parameters(), strict=True)
        optimizers = [torch.optim.SGD([p], lr=lr) for lr, p in parts]
        handle = torchcomp.register(model, "ef(topk(0.2))", lr_inside=optimizers)
        model(inputs(0)).backward()
        return handle.averager.units.lrs

    assert on_threads(2, body) == [{"a": 0.1, "b": 0.2}] * 2


def bad_on_rank_1(nodes: int | None, lr: Any) -> tuple[type[BaseException], int]:
    """The error of a step with a learning rate that rank 1 alone cannot use, and the steps then."""
    run = Run(nodes=nodes)
    run.step(0)
    run.step(1)
    if dist.get_rank() == 1:
        run.optimizer.param_groups[1]["lr"] = lr
    a_loss = run.model(inputs(2))
    return type(caught(a_loss.backward)), run.handle.state_dict()["step"]


@pytest.mark.parametrize("lr", [float("nan"), *thorough([None, -1.0])])
@pytest.mark.parametrize("nodes", [None, 2])
def test_no_rank_waits_for_one_with_a_bad_learning_rate(nodes: int | None, lr: Any) -> None:
    # The group's timeout is longer than that of the test.
    ranks = 4 if nodes else 2
    found = on_processes(ranks, bad_on_rank_1, nodes, lr, timeout=PATIENCE / 2)
    errors = [SpecError if rank == 1 else RankFailureError for rank in range(ranks)]
    assert found == [(error, 2) for error in errors]
