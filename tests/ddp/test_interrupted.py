"""A backward pass that raised: the state before the step is still there to save, load and swap."""

import time
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ddp.runs import TOPK, Run, without_traffic
from tests.support.cases import only, thorough
from tests.support.models import THROUGH_DDP, loss_of, rows
from tests.support.outcomes import caught, same
from tests.support.ranks import on_processes, on_threads
from torchcomp.ddp.executors import after_backward


class Stop(BaseException):
    """As KeyboardInterrupt, no Exception."""


def interrupt(run: Run, layer: int | None, error: type[BaseException] = Stop) -> None:
    """Raise when the backward pass reaches `layer`; None is its end, after the last bucket."""

    def stop(gradient: Tensor | None = None) -> None:
        raise error

    output = run.model(rows(100))
    if layer is None:
        # The engine calls these in order, so this one comes before those of DDP and of the handle.
        hook = output.register_hook(lambda gradient: after_backward(stop))
    else:
        hook = run.model.module[layer].weight.register_hook(stop)
    with pytest.raises(error):
        loss_of(output).backward()
    hook.remove()


def interrupted(spec: str, error: type[BaseException], layer: int | None, options: Any) -> None:
    """Compare six steps with those where the fourth is interrupted, and another model goes on."""
    whole, run = Run(spec, **options).train(*range(6)), Run(spec, **options).train(*range(3))
    before = run.state
    interrupt(run, layer, error)
    after = run.state
    assert same(without_traffic(after), without_traffic(before))
    run.handle.load_state_dict(after)
    run.handle.swap(spec)
    run.handle.close()
    again = Run(spec, **options)
    again.model.load_state_dict(run.model.state_dict())
    again.handle.load_state_dict(after)
    again.train(*range(3, 6))
    outcomes = [[each.weights, each.state["slots"], each.state["step"]] for each in (whole, again)]
    assert same(*outcomes)
    whole.handle.close()
    again.handle.close()


# Gradients of layer 6 come first: no bucket is complete. Those of layer 0 come last.
@pytest.mark.parametrize("layer", [6, 0, None])
@pytest.mark.parametrize("spec", only(THROUGH_DDP, now=(TOPK, "powersgd(rank=1)")))
def test_state_before_the_step_can_be_saved_loaded_and_swapped(
    spec: str, layer: int | None
) -> None:
    on_threads(2, interrupted, spec, Stop, layer, {})


def _over_gloo(options: Any) -> None:
    for layer in (6, 0, None):
        interrupted(TOPK, KeyboardInterrupt, layer, options)


@pytest.mark.parametrize("options", [*thorough([{}]), {"nodes": 2}])
def test_the_same_over_gloo(options: Any) -> None:
    on_processes(2, _over_gloo, options)


def asked_by_another_thread() -> tuple[type[Exception] | None, int]:
    run, errors = Run(), []

    def ask(gradient: Tensor) -> None:
        other = Thread(target=lambda: errors.append(caught(run.handle.state_dict)))
        other.start()
        other.join()

    run.train(0)
    hook = run.model.module[0].weight.register_hook(ask)
    run.train(1)
    hook.remove()
    run.train(2)
    return type(errors[0]), run.state["step"]


def test_another_thread_does_not_take_a_running_pass_for_one_that_raised() -> None:
    assert on_processes(2, asked_by_another_thread) == [(RuntimeError, 3)] * 2


def at_different_layers() -> int:
    run = Run().train(0, 1, 2)
    before = run.state
    # Rank 1 has sent buckets which rank 0 never joins.
    interrupt(run, (6, 0, None)[dist.get_rank()], KeyboardInterrupt)
    gathered = run.handle.gather_state_dict(dst=None)
    assert same(without_traffic(run.state), without_traffic(before))
    run.handle.load_state_dict(run.state)
    run.handle.close()
    return len(gathered["states"])


def test_no_rank_waits_for_what_another_one_never_joins() -> None:
    assert on_processes(3, at_different_layers) == [3] * 3


@pytest.mark.parametrize("options", [{}, {"nodes": 2}])
def test_an_interrupted_step_does_not_end_a_flush(options: Any) -> None:
    """It would have sent what a swap has left."""

    def body() -> None:
        run = Run(**options).train(0, 1, 2)
        run.handle.swap("mean")
        before, norms = run.state, run.handle.residual_norms()
        interrupt(run, None)
        assert same(without_traffic(run.state), without_traffic(before))
        assert run.handle.residual_norms() == norms
        assert any(norms.values())
        assert before["flushing"]

    on_threads(2, body)


def at_a_new_scale() -> None:
    """Interrupt the first step with another loss scale, at another layer on each rank."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    run = Run(scaler=scaler)
    for step in range(3):
        run.backward(step)
    before = run.state
    scaler.update(16.0)

    def wait_for_the_thread(gradient: Tensor) -> None:
        while dist.get_rank() == 1 and run.handle.averager.units.scale != 16.0:
            time.sleep(0.01)

    run.model.module[0].weight.register_hook(wait_for_the_thread)
    # Rank 0 has sent no bucket yet, and rank 1 all of them.
    interrupt(run, (6, None)[dist.get_rank()])
    assert before["scale"] == 8.0
    assert same(without_traffic(run.state), without_traffic(before))


def test_the_scale_of_an_interrupted_step_is_taken_back() -> None:
    on_processes(2, at_a_new_scale)
