"""register(..., check="late"): a step is checked when the next one begins."""

import os
from collections.abc import Callable
from functools import partial
from threading import Event, Timer
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchcomp
from tests.support.models import gradients, kept, loss_of, mlp, rows, wrap
from tests.support.outcomes import assert_refused, raised_by, same
from tests.support.ranks import on_processes, on_threads
from torchcomp import Guard, NonFiniteError, RankFailureError, RankMismatchError

TOPK = "ef(topk(0.1))"


def train(check: str) -> list[Any]:
    model = wrap(mlp())
    handle = torchcomp.register(model, TOPK, check=check)
    found: list[Any] = []
    for step in range(4):
        model.zero_grad()
        loss_of(model(rows(step))).backward()
        found.append(gradients(model))
    return [*found, handle.state_dict()]


def test_a_run_is_the_same_bit_for_bit() -> None:
    assert same(on_threads(2, train, "late"), on_threads(2, train, "now"))


def fails_late() -> None:
    model = wrap(mlp())
    handle = torchcomp.register(model, TOPK, check="late")
    for step in range(2):
        loss_of(model(rows(step))).backward()
    before, sent = kept(handle.state_dict()), handle.stats.total_bytes_sent
    spoil = model.module[0].weight.register_hook(lambda g: g / dist.get_rank())
    loss_of(model(rows(2))).backward()
    spoil.remove()
    model.zero_grad()
    error = raised_by(lambda: loss_of(model(rows(3))).backward())
    assert isinstance(error, NonFiniteError)
    for part in ("step 3", "'0.weight' on rank 0"):
        assert part in str(error)
    assert "on rank 1" not in str(error)
    assert same(kept(handle.state_dict()), before)
    # As with check="now", the step did not count, but its bytes did.
    assert handle.state_dict()["step"] == handle.stats.steps == 2
    assert handle.stats.total_bytes_sent > sent
    model.zero_grad()
    loss_of(model(rows(4))).backward()
    assert handle.state_dict()["step"] == 3
    handle.close()


def test_a_nan_raises_in_the_next_backward_pass() -> None:
    on_threads(2, fails_late)
    on_processes(2, fails_late)


def after_a_nan(build: Callable[..., torch.optim.Optimizer]) -> tuple[list[Any], list[Any]]:
    """Apply a step with a NaN on one rank; return the parameters before and after."""
    model = wrap(mlp())
    torchcomp.register(model, TOPK, check="late")
    optimizer = build(model.parameters())
    before: list[Any] = []
    for step in range(3):
        optimizer.zero_grad()
        spoiled = step == 2 and dist.get_rank() == 1
        (loss_of(model(rows(step))) * (float("nan") if spoiled else 1.0)).backward()
        before = [each.clone() for each in model.parameters()]
        optimizer.step()
    return before, [each.detach() for each in model.parameters()]


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
    model = wrap(mlp())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    handle = torchcomp.register(model, TOPK, scaler=scaler, check=check)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        overflows = step == 3 and dist.get_rank() == 1
        scaler.scale(loss_of(model(rows(step))) * (float("inf") if overflows else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert handle.state_dict()["step"] == handle.stats.steps == 6
    return [model.state_dict(), optimizer.state_dict(), scaler.state_dict(), handle.state_dict()]


def test_a_scaler_skips_what_the_device_has_found() -> None:
    assert same(on_threads(2, scaled, "late"), on_threads(2, scaled, "now"))


def test_ranks_that_check_at_different_times_are_refused() -> None:
    def body() -> None:
        torchcomp.register(wrap(mlp()), TOPK, check="late" if dist.get_rank() else "now")

    assert_refused(2, body, RankMismatchError, "late", "now", "check")


def interrupted_while_the_ranks_look_for_the_nan() -> tuple[int, int]:
    """Interrupt a pass while its thread waits for the result of the step before, then load."""
    model = wrap(mlp())
    handle = torchcomp.register(model, TOPK, check="late")
    for step in range(3):
        loss_of(model(rows(step))).backward()
    state = handle.state_dict()
    spoil = model.module[0].weight.register_hook(lambda g: g / 0)
    loss_of(model(rows(3))).backward()
    spoil.remove()
    averager, waits, go = handle.averager, Event(), Event()
    (decide,) = averager._reasons

    def slowly() -> bool:
        waits.set()
        go.wait()
        return decide()

    averager._reasons = (slowly,)

    def stop(gradient: torch.Tensor) -> None:
        waits.wait()
        raise KeyboardInterrupt

    model.module[0].weight.register_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        loss_of(model(rows(4))).backward()
    Timer(0.2, go.set).start()
    step = handle.state_dict()["step"]
    handle.load_state_dict({**state, "step": 100})
    return step, handle.state_dict()["step"]


def test_a_pass_that_was_interrupted_before_the_last_step_was_decided() -> None:
    assert on_processes(2, interrupted_while_the_ranks_look_for_the_nan) == [(3, 100)] * 2


def closes(options: dict[str, Any]) -> Any:
    model = wrap(mlp())
    handle = torchcomp.register(model, TOPK, check="late", **options)
    for step in range(2):
        loss_of(model(rows(step))).backward()
    before = kept(handle.state_dict())
    spoil = model.module[0].weight.register_hook(lambda g: g / dist.get_rank())
    loss_of(model(rows(2))).backward()
    spoil.remove()
    error = raised_by(handle.close)
    assert same(kept(handle.state_dict()), before)
    handle.close()
    return type(error), "'0.weight'" in str(error), handle.closed, handle.state_dict()["step"]


@pytest.mark.parametrize("options", [{}, {"nodes": 2}, {"guard": Guard(every=3)}], ids=str)
def test_close_raises_what_the_last_step_had_and_the_state_is_that_before_it(
    options: dict[str, Any],
) -> None:
    assert on_processes(4, closes, options) == [(NonFiniteError, True, True, 2)] * 4


def test_close_after_a_step_that_counts_raises_nothing() -> None:
    def body() -> Any:
        model = wrap(mlp())
        with torchcomp.register(model, TOPK, check="late") as handle:
            loss_of(model(rows(0))).backward()
            assert handle.averager.undecided
        return handle.averager.undecided, handle.state_dict()["step"]

    assert on_threads(2, body) == [(False, 1)] * 2


def closes_alone() -> Any:
    """Rank 1 ends after a step in which rank 0 had a NaN. Its name must be agreed on."""
    model = wrap(mlp())
    handle = torchcomp.register(model, TOPK, check="late")
    (loss_of(model(rows(0))) * (dist.get_rank() or float("nan"))).backward()
    if dist.get_rank() == 1:
        os._exit(1)
    return type(raised_by(handle.close)), handle.closed


def test_close_ends_although_another_rank_has_failed() -> None:
    closed, _ = on_processes(2, closes_alone, catch=True)
    assert closed == (RankFailureError, True)
