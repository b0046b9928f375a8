"""register(..., check="late"): a step is checked when the next one begins."""

import os
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ddp.runs import Run
from tests.support.models import kept
from tests.support.outcomes import raised_by, same
from tests.support.ranks import on_processes, on_threads
from torchcomp import Guard, NonFiniteError, RankFailureError


def after_a_nan(build: Any) -> tuple[list[Any], list[Any]]:
    """Apply a step with a NaN on rank 1; return the parameters before and after."""
    run = Run(check="late")
    run.optimizer = build(run.model.parameters())
    run.train(0, 1)
    before = [each.clone() for each in run.model.parameters()]
    run.step(2, float("nan") if dist.get_rank() else 1.0)
    return before, [each.detach() for each in run.model.parameters()]


def test_a_nan_of_one_rank_does_not_reach_the_parameters() -> None:
    """Without momentum and weight decay, they do not change; with them, they stay finite."""
    for before, after in on_threads(2, after_a_nan, partial(torch.optim.SGD, lr=0.1)):
        assert same(before, after)
    adam = on_threads(2, after_a_nan, partial(torch.optim.AdamW, lr=0.1))
    for before, after in adam:
        assert all(each.isfinite().all() for each in after)
        assert not same(before, after)
    assert same(adam[0][1], adam[1][1])


def scaled(check: str) -> list[Any]:
    """Train with a step that overflows on rank 1 only."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    run = Run(scaler=scaler, check=check)
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.1)
    for step in range(6):
        run.step(step, float("inf") if step == 3 and dist.get_rank() else 1.0)
    assert run.state["step"] == run.handle.stats.steps == 6
    return [run.model.state_dict(), run.optimizer.state_dict(), scaler.state_dict(), run.state]


def test_a_scaler_skips_what_the_device_has_found() -> None:
    assert same(on_threads(2, scaled, "late"), on_threads(2, scaled, "now"))


def closes(options: dict[str, Any]) -> Any:
    run = Run(check="late", **options)
    run.backward(0)
    run.backward(1)
    before = kept(run.state)
    run.poison(float("nan"), layer="0.weight")
    run.backward(2)
    error = raised_by(run.handle.close)
    assert same(kept(run.state), before)
    run.handle.close()
    return type(error), "'0.weight'" in str(error), run.handle.closed, run.state["step"]


@pytest.mark.parametrize("options", [{}, {"nodes": 2}, {"guard": Guard(every=3)}], ids=str)
def test_close_raises_what_the_last_step_had_and_the_state_is_that_before_it(
    options: dict[str, Any],
) -> None:
    assert on_processes(4, closes, options) == [(NonFiniteError, True, True, 2)] * 4


def closes_alone() -> Any:
    """Rank 1 ends after a step in which rank 0 had a NaN. Its name must be agreed on."""
    run = Run(check="late")
    run.backward(0, dist.get_rank() or float("nan"))
    if dist.get_rank() == 1:
        os._exit(1)
    return type(raised_by(run.handle.close)), run.handle.closed


def test_close_ends_although_another_rank_has_failed() -> None:
    closed, _ = on_processes(2, closes_alone, catch=True)
    assert closed == (RankFailureError, True)
