"""A backward pass that raised: the state before the step is still there to save, load and swap."""

from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from tests.support.cases import only, thorough
from tests.support.models import THROUGH_DDP, loss_of, mlp, rows, weights, wrap
from tests.support.outcomes import caught, same
from tests.support.ranks import on_processes, on_threads
from torchcomp.ddp.executors import after_backward


class Stop(BaseException):
    """As KeyboardInterrupt, no Exception."""


def interrupted(spec: str, error: type[BaseException], layer: int | None, two_levels: bool) -> Any:
    """Train for six steps without and with an interruption of the fourth on all ranks.

    DDP itself cannot go on after a backward pass that raised, so another model goes on.

    Returns:
        Weights and state of both runs.
    """
    options, results = {"nodes": 2} if two_levels else {}, []
    for interrupt in (False, True):
        model = wrap(mlp())
        handle = torchcomp.register(model, spec, **options)
        for step in range(6):
            if interrupt and step == 3:
                before = handle.state_dict()
                _interrupt(model, layer, error)
                after = handle.state_dict()
                assert same(kept_in(after), kept_in(before))
                handle.load_state_dict(after)
                handle.swap(spec)
                handle.close()
                model, stopped = wrap(mlp()), model
                model.load_state_dict(stopped.state_dict())
                handle = torchcomp.register(model, spec, **options)
                handle.load_state_dict(after)
            train(model, step)
        state = handle.state_dict()
        handle.close()
        results.append([weights(model), state["slots"], state["step"]])
    return results


def kept_in(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state without its counters: a step that was interrupted has sent its bytes."""
    return {name: value for name, value in state.items() if name != "traffic"}


def train(model: DistributedDataParallel, step: int) -> None:
    model.zero_grad()
    loss_of(model(rows(step))).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.05 * parameter.grad


def _interrupt(
    model: DistributedDataParallel, layer: int | None, error: type[BaseException]
) -> None:
    """Raise when the backward pass reaches `layer`; None is its end, after the last bucket."""

    def stop(gradient: Tensor | None = None) -> None:
        raise error

    output = model(rows(100))
    if layer is None:
        # The engine calls these in order, so this one comes before those of DDP and of the handle.
        output.register_hook(lambda gradient: after_backward(stop))
        hook = None
    else:
        hook = model.module[layer].weight.register_hook(stop)
    try:
        loss_of(output).backward()
    except error:
        if hook is not None:
            hook.remove()
        return
    raise AssertionError("the backward pass has ended")


# Gradients of layer 6 come first: no bucket is complete. Those of layer 0 come last.
@pytest.mark.parametrize("layer", [6, 0, None])
@pytest.mark.parametrize("spec", only(THROUGH_DDP, now=("ef(topk(0.1))", "powersgd(rank=1)")))
def test_state_before_the_step_can_be_saved_loaded_and_swapped(
    spec: str, layer: int | None
) -> None:
    for whole, stopped in on_threads(2, interrupted, spec, Stop, layer, False):
        assert same(stopped, whole)


@pytest.mark.parametrize("two_levels", [*thorough([False]), True])
def test_the_same_over_gloo(two_levels: bool) -> None:
    outcomes = on_processes(2, _over_gloo, two_levels)
    for whole, stopped in (pair for outcome in outcomes for pair in outcome):
        assert same(stopped, whole)


def _over_gloo(two_levels: bool) -> list[Any]:
    return [
        interrupted("ef(topk(0.1))", KeyboardInterrupt, layer, two_levels) for layer in (6, 0, None)
    ]


def asked_by_another_thread() -> tuple[type[Exception] | None, int]:
    """The error of state_dict in another thread during a backward pass, and the steps then."""
    model, errors = wrap(mlp()), []
    handle = torchcomp.register(model, "ef(topk(0.1))")

    def ask(gradient: Tensor) -> None:
        other = Thread(target=lambda: errors.append(caught(handle.state_dict)))
        other.start()
        other.join()

    train(model, 0)
    hook = model.module[0].weight.register_hook(ask)
    train(model, 1)
    hook.remove()
    train(model, 2)
    return type(errors[0]), handle.state_dict()["step"]


def test_another_thread_does_not_take_a_running_pass_for_one_that_raised() -> None:
    assert on_processes(2, asked_by_another_thread) == [(RuntimeError, 3)] * 2


def later_state_after_an_interruption() -> tuple[int, int]:
    model = wrap(mlp())
    handle = torchcomp.register(model, "ef(topk(0.1))")
    for step in range(3):
        train(model, step)
    state = handle.state_dict()
    _interrupt(model, 0, Stop)
    handle.load_state_dict({**state, "step": 100})
    return handle.state_dict()["step"], handle.state_dict()["step"]


def test_a_state_of_a_later_step_can_be_loaded_after_an_interruption() -> None:
    assert on_threads(2, later_state_after_an_interruption) == [(100, 100)] * 2


def at_different_layers() -> tuple[Any, Any, int]:
    """State before an interruption and after it, and the number of gathered states."""
    model = wrap(mlp())
    handle = torchcomp.register(model, "ef(topk(0.1))")
    for step in range(3):
        train(model, step)
    before = handle.state_dict()
    # Rank 1 has sent buckets which rank 0 never joins.
    _interrupt(model, (6, 0, None)[dist.get_rank()], KeyboardInterrupt)
    gathered = handle.gather_state_dict(dst=None)
    after = handle.state_dict()
    handle.load_state_dict(after)
    handle.close()
    return kept_in(before), kept_in(after), len(gathered["states"])


def test_no_rank_waits_for_what_another_one_never_joins() -> None:
    for before, after, ranks in on_processes(3, at_different_layers):
        assert same(after, before)
        assert ranks == 3


def interrupted_flush(two_levels: bool) -> tuple[float, float, Any, Any]:
    """Interrupt, at its end, the step that would have sent what a swap has left.

    Returns:
        Norm of the residual before and after, and the states.
    """
    model = wrap(mlp())
    handle = torchcomp.register(model, "ef(topk(0.1))", **({"nodes": 2} if two_levels else {}))
    for step in range(3):
        train(model, step)
    handle.swap("mean")
    before, norm = handle.state_dict(), sum(handle.residual_norms().values())
    _interrupt(model, None, Stop)
    after = handle.state_dict()
    return norm, sum(handle.residual_norms().values()), kept_in(before), kept_in(after)


@pytest.mark.parametrize("two_levels", [False, True])
def test_an_interrupted_step_does_not_end_a_flush(two_levels: bool) -> None:
    for norm, norm_after, before, after in on_threads(2, interrupted_flush, two_levels):
        assert norm > 0
        assert norm_after == norm
        assert same(after, before)
        assert after["flushing"]


def interrupted_at_a_new_scale() -> tuple[Any, Any]:
    """Interrupt the first step with another loss scale, at another layer on each rank."""
    model, scaler = wrap(mlp()), torch.amp.GradScaler("cpu", init_scale=8.0)
    handle = torchcomp.register(model, "ef(topk(0.1))", scaler=scaler)
    for step in range(3):
        scaler.scale(loss_of(model(rows(step)))).backward()
    before = handle.state_dict()
    scaler.update(16.0)
    # Rank 0 has sent no bucket yet, and rank 1 all of them.
    _interrupt(model, (6, None)[dist.get_rank()], Stop)
    return kept_in(before), kept_in(handle.state_dict())


def test_the_scale_of_an_interrupted_step_is_taken_back() -> None:
    for before, after in on_processes(2, interrupted_at_a_new_scale):
        assert before["scale"] == 8.0
        assert same(after, before)


def trained_by_a_thread_that_ended() -> tuple[int, Any]:
    model = wrap(mlp())
    handle = torchcomp.register(model, "ef(topk(0.1))")

    def work() -> None:
        train(model, 0)
        _interrupt(model, 0, Stop)

    thread = Thread(target=work)
    thread.start()
    thread.join()
    state = handle.state_dict()
    handle.load_state_dict(state)
    return state["step"], handle.swap("mean")


def test_the_thread_of_the_pass_that_raised_can_have_ended() -> None:
    assert [step for step, _ in on_processes(2, trained_by_a_thread_that_ended)] == [1, 1]
