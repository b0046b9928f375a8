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
from tests.support.logs import messages_of
from tests.support.models import kept, mlp, wrap
from tests.support.outcomes import assert_close, assert_refused, caught, flat
from tests.support.patience import PATIENCE
from tests.support.ranks import on_processes, on_threads
from torchcomp import RankFailureError, RankMismatchError, SpecError


class Linear(nn.Module):
    """Two vectors, whose gradients are the inputs: all updates are then known beforehand."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(30, dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros(20, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([self.a, self.b]) @ inputs


def inputs(step: int, rank: int) -> Tensor:
    noise = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(50, generator=noise, dtype=torch.float64)


class Run:
    """Training with two parameter groups and a learning rate that falls in every step."""

    def __init__(self, spec: str, **options: Any) -> None:
        self.model = wrap(Linear())
        groups = [{"params": [self.model.module.a]}, {"params": [self.model.module.b], "lr": 0.5}]
        self.optimizer = torch.optim.SGD(groups, lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        self.handle = torchcomp.register(self.model, spec, lr_inside=self.optimizer, **options)
        self.expected = torch.zeros(50, dtype=torch.float64)  # of dense training, on this rank

    def lrs(self) -> Tensor:
        a, b = (group["lr"] for group in self.optimizer.param_groups)
        return torch.tensor([a] * 30 + [b] * 20, dtype=torch.float64)

    def train(self, *steps: int) -> "Run":
        for step in steps:
            self.optimizer.zero_grad()
            self.model(inputs(step, dist.get_rank())).backward()
            self.expected -= self.lrs() * inputs(step, dist.get_rank())
            self.optimizer.step()
            self.scheduler.step()
        return self

    def unsent(self) -> Tensor:
        """This rank's residual in the unit of the update; its mean over the ranks is unsent."""
        state, lrs = self.handle.state_dict(), self.handle.averager.units.lrs
        found = torch.zeros(50, dtype=torch.float64)
        for name, at in (("a", 0), ("b", 30)):
            error = kept(state)[name]
            found[at : at + error.numel()] += lrs[name] * error
        return found

    def server(self) -> Tensor:
        """The sum of all ranks' server residuals, in the unit of the update."""
        lrs = self.handle.averager.units.lrs
        own = {
            n: lrs[n] * part for n, part in kept(self.handle.state_dict(), "server_error").items()
        }
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own)
        return torch.cat([each[name] for name in ("b", "a") for each in every if name in each])


def weights(run: Run) -> Tensor:
    return flat([run.model.module.a, run.model.module.b])


@pytest.mark.parametrize("check", ["now", "late"])
def test_weights_and_residual_are_what_dense_training_applies(check: str) -> None:
    def body() -> tuple[Tensor, Tensor, Tensor]:
        run = Run("ef(topk(0.2))", check=check).train(*range(12))
        return weights(run), run.unsent(), run.expected

    outcomes = on_threads(2, body)
    left = sum(unsent for _, unsent, _ in outcomes) / 2
    assert left.abs().max() > 0.01
    # w = w_0 - the sum of lr * mean g, plus what has not been sent.
    assert_close(outcomes[0][0] - left, sum(expected for *_, expected in outcomes) / 2)


def test_accumulated_gradients_follow_the_learning_rate_of_their_step() -> None:
    def body() -> tuple[Tensor, Tensor, Tensor]:
        run, rank = Run("ef(topk(0.2))"), dist.get_rank()
        for step in range(4):
            run.optimizer.zero_grad()
            with run.model.no_sync():
                run.model(inputs(step, rank)).backward()
            run.model(inputs(10 + step, rank)).backward()
            run.expected -= run.lrs() * (inputs(step, rank) + inputs(10 + step, rank))
            run.optimizer.step()
            run.scheduler.step()
        return weights(run), run.unsent(), run.expected

    outcomes = on_threads(2, body)
    left = sum(unsent for _, unsent, _ in outcomes) / 2
    assert_close(outcomes[0][0] - left, sum(expected for *_, expected in outcomes) / 2)


def test_a_step_that_the_scaler_skips_changes_no_residual() -> None:
    def body() -> tuple[Tensor, Tensor, Tensor, bool]:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        run, rank = Run("ef(topk(0.2))", scaler=scaler), dist.get_rank()
        skipped = False
        for step in range(6):
            run.optimizer.zero_grad()
            overflows = step == 3
            x = inputs(step, rank) / (0.0 if overflows and rank else 1.0)
            scaler.scale(run.model(x)).backward()
            before = weights(run)
            scaler.step(run.optimizer)
            scaler.update()
            run.scheduler.step()
            skipped |= overflows and torch.equal(before, weights(run))
            if not overflows:
                # The scheduler has already gone on.
                run.expected -= run.lrs() / 0.8 * inputs(step, rank)
        return weights(run), run.unsent() / run.handle.averager.units.scale, run.expected, skipped

    outcomes = on_threads(2, body)
    assert all(skipped for *_, skipped in outcomes)
    left = sum(unsent for _, unsent, *_ in outcomes) / 2
    assert_close(outcomes[0][0] - left, sum(each[2] for each in outcomes) / 2)


def test_several_optimizers_train_the_parts_of_a_model() -> None:
    def body() -> dict[str, float]:
        model = wrap(Linear())
        optimizers = [
            torch.optim.SGD([p], lr=lr)
            for lr, p in zip((0.1, 0.2), model.parameters(), strict=True)
        ]
        handle = torchcomp.register(model, "ef(topk(0.2))", lr_inside=optimizers)
        model(inputs(0, dist.get_rank())).backward()
        return handle.averager.units.lrs

    assert on_threads(2, body) == [{"a": 0.1, "b": 0.2}] * 2


@pytest.mark.parametrize(
    ("optimizer", "warned"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), []),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), ["SGD"]),
        (lambda p: torch.optim.AdamW(p, lr=0.1), ["AdamW"]),
    ],
    ids=["SGD", "momentum", "AdamW"],
)
def test_only_plain_sgd_is_registered_without_a_warning(
    optimizer: Any, warned: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def body() -> None:
        model = wrap(Linear())
        torchcomp.register(model, "ef(topk(0.2))", lr_inside=optimizer(model.parameters()))

    on_threads(2, body)
    lines = messages_of("ddp.log", caplog)
    assert len(lines) == len(warned)  # on one rank only
    assert all(name in line for line in lines for name in ("lr_inside", *warned))


# --- Errors ---------------------------------------------------------------------------------------


def partial(model: nn.Module) -> Any:
    return torch.optim.SGD([model.module[0].weight], lr=0.1)


def both(model: nn.Module) -> Any:
    return [torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.1, 0.2)]


def without_lr(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    del optimizer.param_groups[0]["lr"]
    return optimizer


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda model: 0.1, ["float"]),
        (lambda model: [partial(model), None], ["NoneType"]),
        (partial, ["'0.bias'"]),
        (both, ["'0.weight'", "several"]),
        (without_lr, ["SGD", "'lr'"]),
    ],
)
def test_what_has_no_learning_rates_is_refused(optimizer: Any, words: list[str]) -> None:
    def body() -> None:
        model = wrap(mlp())
        torchcomp.register(model, "ef(topk(0.1))", lr_inside=optimizer(model))

    assert_refused(2, body, SpecError, *words, field="lr_inside")


def test_an_optimizer_on_some_ranks_only_is_refused() -> None:
    def body() -> None:
        model = wrap(mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inside = optimizer if dist.get_rank() else None
        torchcomp.register(model, "ef(topk(0.1))", lr_inside=inside)

    assert_refused(2, body, RankMismatchError, "lr_inside", "rank 0", "rank 1")


def test_a_scheduler_on_one_rank_only_is_found() -> None:
    def body() -> None:
        run = Run("ef(topk(0.2))").train(0)
        if dist.get_rank():
            run.scheduler.step()
        run.optimizer.zero_grad()
        run.model(inputs(1, dist.get_rank())).backward()

    assert_refused(2, body, RankMismatchError, "lr", "step 2", "rank 0", "rank 1")


def bad_on_rank_1(nodes: int | None, lr: Any) -> tuple[type[BaseException], int]:
    """The error of a step with a learning rate that rank 1 alone cannot use, and the steps then."""
    run = Run("ef(topk(0.2))", **({} if nodes is None else {"nodes": nodes})).train(0, 1)
    if dist.get_rank() == 1:
        run.optimizer.param_groups[1]["lr"] = lr
    error = caught(lambda: run.train(2))
    return type(error), run.handle.state_dict()["step"]


@pytest.mark.parametrize("lr", [float("nan"), *thorough([None, -1.0])])
@pytest.mark.parametrize("nodes", [None, 2])
def test_no_rank_waits_for_one_with_a_bad_learning_rate(nodes: int | None, lr: Any) -> None:
    # The group's timeout is longer than that of the test.
    ranks = 4 if nodes else 2
    found = on_processes(ranks, bad_on_rank_1, nodes, lr, timeout=PATIENCE / 2)
    errors = [SpecError if rank == 1 else RankFailureError for rank in range(ranks)]
    assert found == [(error, 2) for error in errors]
