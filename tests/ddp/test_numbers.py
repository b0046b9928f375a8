"""Numbers at the ends of a dtype's range: denormals, overflow on one rank, a scaler's last step."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchcomp
from tests.ddp.test_nonfinite import CULPRIT, ScaledRun, poison
from tests.support.cases import only
from tests.support.models import METHODS, THROUGH_DDP, gradients, loss_of, mlp, rows, weights, wrap
from tests.support.outcomes import raised_by, same
from tests.support.ranks import on_threads
from torchcomp import NonFiniteError


class Scaled(nn.Module):
    """Multiplies all gradients by a power of two, which keeps the values of normal numbers."""

    def __init__(self, module: nn.Module, factor: float) -> None:
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            parameter.register_hook(lambda gradient: gradient * factor)

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


def denormal(spec: str) -> tuple[list[Tensor], list[Tensor]]:
    """Means of three steps, and the own gradients of this rank, all of them denormal."""
    model = wrap(Scaled(mlp(torch.float32), 2.0**-140))
    handle = torchcomp.register(model, spec)
    means, own = [], []
    for step in range(3):
        model.zero_grad()
        with model.no_sync():
            loss_of(model(rows(step, torch.float32))).backward()
        own.append(torch.cat([each.flatten() for each in gradients(model).values()]))
        model.zero_grad()
        loss_of(model(rows(step, torch.float32))).backward()
        means.append(torch.cat([each.flatten() for each in gradients(model).values()]))
    handle.close()
    return means, own


@pytest.mark.parametrize("spec", only(METHODS, now=THROUGH_DDP))
def test_means_of_denormal_gradients_are_finite_denormal_and_the_same_on_all_ranks(
    spec: str,
) -> None:
    outcomes = on_threads(2, denormal, spec)
    tiny = torch.finfo(torch.float32).smallest_normal
    for means, own in outcomes:
        assert all(0 < each.abs().max() < tiny for each in own)
        for step, mean in enumerate(means):
            assert torch.isfinite(mean).all()
            assert torch.equal(mean, outcomes[0][0][step])
            assert mean.abs().max() < tiny


def test_an_exact_method_keeps_denormal_gradients() -> None:
    outcomes = on_threads(2, denormal, "ef(topk(1.0))")
    for step, mean in enumerate(outcomes[0][0]):
        exact = sum(own[step] for _, own in outcomes) / 2
        # To one unit of the smallest number in each of the additions.
        torch.testing.assert_close(mean, exact, rtol=0, atol=4 * 2.0**-149)


def fp16_overflow(spec: str) -> tuple[str, bool, Tensor]:
    model = wrap(mlp(torch.float16))
    handle = torchcomp.register(model, spec)
    for step in range(2):
        loss_of(model(rows(step, torch.float16))).backward()
    before = handle.state_dict()
    # Finite in float32, but not in the dtype of the gradients, and on one rank only.
    factor = 1e7 if dist.get_rank() == CULPRIT else 1.0
    loss = loss_of(model(rows(2, torch.float16))).float() * factor
    error = raised_by(loss.backward)
    assert type(error) is NonFiniteError
    unchanged = same(handle.state_dict()["slots"], before["slots"])
    model.zero_grad()
    loss_of(model(rows(3, torch.float16))).backward()
    applied = torch.cat([each.flatten() for each in gradients(model).values()])
    handle.close()
    return str(error), unchanged, applied


@pytest.mark.parametrize("spec", only(METHODS[1:], now=THROUGH_DDP))
def test_gradients_that_overflow_fp16_on_one_rank_are_found_on_all(spec: str) -> None:
    outcomes = on_threads(3, fp16_overflow, spec)
    for message, unchanged, applied in outcomes:
        assert re.search(rf"\brank {CULPRIT}\b", message), message
        assert unchanged
        assert torch.isfinite(applied).all()
        assert torch.equal(applied, outcomes[0][2])


def ends_with_a_skipped_step(spec: str) -> tuple[Any, Any]:
    """Four steps, of which the last one is skipped, a checkpoint, and three more steps.

    Returns:
        Weights and residuals of that run and of one that resumes from the checkpoint.
    """

    def outcome(run: ScaledRun) -> list[Any]:
        state = run.handle.state_dict()
        return [weights(run.model.module), state["slots"], state["scale"], run.scaler.get_scale()]

    run = ScaledRun(spec, 64.0, growth_interval=2)
    for step in range(3):
        run.step(step)
    hook = poison(run.model, float("inf"))
    run.step(3, skipped=True)
    hook.remove()
    resumed = ScaledRun(spec, 1.0, growth_interval=2)
    resumed.model.module.load_state_dict(run.model.module.state_dict())
    resumed.handle.load_state_dict(run.handle.state_dict())
    resumed.scaler.load_state_dict(run.scaler.state_dict())
    for each in (run, resumed):
        for step in range(4, 7):
            each.step(step)
    return outcome(run), outcome(resumed)


@pytest.mark.parametrize("spec", only(THROUGH_DDP, now=("ef(topk(0.1))", "powersgd(rank=1)")))
def test_a_run_whose_last_step_the_scaler_skipped_resumes_bit_for_bit(spec: str) -> None:
    for whole, resumed in on_threads(2, ends_with_a_skipped_step, spec):
        assert same(resumed, whole)
