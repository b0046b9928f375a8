"""NaN and infinities on one rank: every rank raises the same error, or all skip the step."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from tests.support.cases import only, thorough
from tests.support.models import (
    CONSERVING,
    METHODS,
    THROUGH_DDP,
    WITH_RESIDUAL,
    Account,
    assert_conserved,
    kept,
    loss_of,
    mlp,
    residual_norm,
    rows,
    weights,
    wrap,
)
from tests.support.outcomes import raised_by
from tests.support.ranks import on_processes, on_threads
from torchcomp import NonFiniteError

CULPRIT = 1
LAYER = "4.weight"
CHECKED = tuple(spec for spec in METHODS if spec != "mean")


def poison(model: DistributedDataParallel, value: float, rank: int = CULPRIT) -> Any:
    """Set one entry of a gradient to `value` on one rank, until the returned hook is removed."""

    def spoil(gradient: Tensor) -> Tensor:
        spoilt = gradient.clone()
        spoilt[0, 0] = value
        return spoilt

    parameter = dict(model.module.named_parameters())[LAYER]
    return parameter.register_hook(spoil if dist.get_rank() == rank else lambda gradient: gradient)


def survives(spec: str, value: float) -> Account:
    """Train with one failed step, where a gradient has `value` on one rank.

    Returns:
        The account, without the failed step.
    """
    model = wrap(mlp())
    handle = torchcomp.register(model, spec)
    account = Account()
    for step in range(3):
        account.step(model, (rows(step),))
    before = handle.state_dict()
    hook = poison(model, value)
    error = raised_by(lambda: loss_of(model(rows(3))).backward())
    hook.remove()
    assert isinstance(error, NonFiniteError), repr(error)
    assert re.search(rf"\bstep 4\b.* '{LAYER}' on rank {CULPRIT}\.", str(error)), error
    after = handle.state_dict()
    assert after["step"] == before["step"] == 3
    assert set(kept(after)) == set(kept(before))
    for name, residual in kept(before).items():
        assert torch.equal(kept(after)[name], residual), name
    for step in range(4, 7):
        account.step(model, (rows(step),))
    handle.close()
    return account.close(handle)


@pytest.mark.parametrize("value", [float("nan"), *thorough([float("inf"), -float("inf")])])
@pytest.mark.parametrize("spec", only(CHECKED, now=THROUGH_DDP))
def test_nonfinite_gradient_raises_on_every_rank_and_training_can_continue(
    spec: str, value: float
) -> None:
    accounts = on_threads(3, survives, spec, value)
    if spec in CONSERVING:
        assert_conserved(accounts)


def test_nonfinite_gradient_raises_on_every_rank_over_gloo() -> None:
    assert_conserved(on_processes(2, survives, "ef(topk(0.1))", float("nan")))


def test_the_error_of_an_overflowing_sum_names_no_rank() -> None:
    def body() -> str:
        model = wrap(mlp(torch.float32))
        torchcomp.register(model, "ef(topk(1.0))")
        model.module[0].weight.register_hook(lambda g: torch.full_like(g, 3e38))
        error = raised_by(lambda: loss_of(model(rows(0, torch.float32))).backward())
        assert isinstance(error, NonFiniteError), repr(error)
        return str(error)

    for message in on_threads(2, body):
        assert "step 1" in message
        assert not re.search(r"\brank [01]\b", message), message


@pytest.mark.parametrize("spec", ['ef(cast("fp16"))', 'ef(topk(1.0, values="fp16"))'])
def test_what_exceeds_the_range_of_float16_is_sent_in_the_next_step(spec: str) -> None:
    """Both ranks have a gradient of 1e5 in one step. float16 can send 65504 of it."""

    def body() -> list[float]:
        model = wrap(torch.nn.Linear(4, 1, bias=False))
        torchcomp.register(model, spec)
        applied = []
        for scale in (1e5, 0.0):
            model.zero_grad()
            model(torch.full((1, 4), scale)).sum().backward()
            applied.append(model.module.weight.grad[0, 0].item())
        return applied

    for first, second in on_threads(2, body):
        assert first == 65504
        assert second == pytest.approx(1e5 - 65504, rel=1e-3)


def test_plain_mean_keeps_a_nan_as_ddp_does() -> None:
    def body() -> bool:
        model = wrap(mlp())
        torchcomp.register(model, "mean")
        poison(model, float("nan"))
        loss_of(model(rows(0))).backward()
        return bool(model.module[4].weight.grad.isnan().any())

    assert all(on_threads(2, body))


def test_a_nan_while_a_swap_flushes_the_residual_does_not_change_it() -> None:
    def body() -> Account:
        model = wrap(mlp())
        handle = torchcomp.register(model, "ef(topk(0.1))")
        account = Account()
        account.step(model, (rows(0),))
        handle.swap("mean")
        norm = residual_norm(handle)
        hook = poison(model, float("nan"))
        error = raised_by(lambda: loss_of(model(rows(1))).backward())
        hook.remove()
        assert isinstance(error, NonFiniteError)
        assert residual_norm(handle) == norm > 0
        account.step(model, (rows(2),))
        assert residual_norm(handle) == 0
        return account.close(handle)

    assert_conserved(on_threads(3, body))


# --- With a GradScaler ----------------------------------------------------------------------------


def scaler_of(scale: float, **options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, **options)


class ScaledRun:
    """One rank's AMP training loop, with an account of the unscaled gradients."""

    def __init__(self, spec: str, scale: float, **options: Any) -> None:
        self.scaler = scaler_of(scale, **options)
        self.model = wrap(mlp())
        self.handle = torchcomp.register(self.model, spec, scaler=self.scaler)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.account = Account()

    def step(self, step: int, skipped: bool = False) -> None:
        self.optimizer.zero_grad()
        loss = loss_of(self.model(rows(step)))
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        if not skipped:
            self.account.note(self.model, (rows(step),))
        self.scaler.step(self.optimizer)
        self.scaler.update()


def skips(spec: str) -> Account:
    run = ScaledRun(spec, 64.0, growth_interval=2)
    for step in range(2):
        run.step(step)
    before, trained = run.handle.state_dict(), weights(run.model.module)
    scale = run.scaler.get_scale()
    assert before["scale"] == 64.0
    assert scale == 128.0
    hook = poison(run.model, float("inf"))
    run.step(2, skipped=True)
    hook.remove()
    assert run.scaler.get_scale() == scale / 2, "the scaler did not see the infinity"
    assert torch.equal(weights(run.model.module), trained), "a rank did not skip"
    after = run.handle.state_dict()
    for name, residual in kept(before).items():
        factor = after["scale"] / before["scale"]
        assert torch.equal(kept(after)[name], residual * factor), name
    for step in range(3, 7):
        run.step(step)
    assert run.handle.state_dict()["scale"] > 64.0
    return run.account.close(run.handle)


@pytest.mark.parametrize("spec", only(WITH_RESIDUAL, now=THROUGH_DDP))
def test_with_a_scaler_all_ranks_skip_and_the_residual_follows_the_scale(spec: str) -> None:
    accounts = on_threads(3, skips, spec)
    if spec in CONSERVING:
        assert_conserved(accounts)


def test_disabled_scaler_does_not_hide_a_nan() -> None:
    """No scaler would skip the step, so the optimizer would apply the NaN."""

    def body() -> None:
        model = wrap(mlp())
        scaler = scaler_of(2.0**14, enabled=False)
        torchcomp.register(model, "ef(topk(0.1))", scaler=scaler)
        poison(model, float("nan"))
        loss_of(model(rows(0))).backward()

    outcomes = on_threads(2, body, catch=True)
    assert [type(outcome) for outcome in outcomes] == [NonFiniteError] * 2
