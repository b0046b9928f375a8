"""A step whose gradients are thrown away does not count: GANs, SAM, dropped steps.

Such a backward pass must be as one under ``no_sync``, bit for bit.
"""

import contextlib
import gc
import logging
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torchcomp
from tests.support.models import (
    Branches,
    loss_of,
    mlp,
    residual_norm,
    rows,
    seeded,
    weights,
    wrap,
)
from tests.support.outcomes import assert_replicas_equal, same
from tests.support.ranks import on_processes, on_threads
from torchcomp.ddp.discarded import Discarded

METHODS = (
    "ef(topk(0.1))",
    'ef(quantize("int8"))',
    "powersgd(rank=1)",
    "bidirectional(topk(0.1), topk(0.1))",
    "dgc(topk(0.1))",
    "ef21(topk(0.1))",
)
TOPK, STEPS = METHODS[0], 6

Wasted = Callable[[], AbstractContextManager[Any]]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def backward(model: Any, step: int, times: float = 1.0) -> None:
    (times * loss_of(model(rows(step)))).backward()


def move(model: nn.Module, by: float) -> None:
    """Move the parameters by the same amount in all runs, whatever the gradients are."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation as it is widely copied, in both of its forms."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        self.model, self.base = model, sgd(model)

    def first_step(self) -> None:
        move(self.model, 0.01)
        self.zero_grad()

    def second_step(self) -> None:
        move(self.model, -0.01)
        self.base.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


# --- Loops that throw gradients away; `wasted` makes the context of such a backward pass ----------


def thrown_away(model: Any, wasted: Wasted, passes: int = 1, to_none: bool = True) -> None:
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=to_none)
        backward(model, 10 * step)
        optimizer.step()
        for number in range(passes):
            optimizer.zero_grad(set_to_none=to_none)
            with wasted():
                backward(model, 10 * step + 1 + number, -1.0)


def thrown_away_as_zeros(model: Any, wasted: Wasted) -> None:
    thrown_away(model, wasted, to_none=False)


def several_in_a_row(model: Any, wasted: Wasted) -> None:
    thrown_away(model, wasted, passes=3)


def accumulated_and_thrown_away(model: Any, wasted: Wasted) -> None:
    """Passes whose gradients are added up, without no_sync, and then cleared together."""
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, 10 * step)
        optimizer.step()
        optimizer.zero_grad()
        for number in range(1 + step % 3):
            with wasted():
                backward(model, 10 * step + 1 + number, -1.0)


def followed_by_no_sync(model: Any, wasted: Wasted) -> None:
    """The thrown-away gradients also have those of passes that did not exchange."""
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            backward(model, 10 * step)
        backward(model, 10 * step + 1)
        optimizer.step()
        optimizer.zero_grad()
        with wasted():
            backward(model, 10 * step + 2)
        if step % 2:
            optimizer.zero_grad()
        with model.no_sync():
            backward(model, 10 * step + 3)
        if step % 3 == 0:
            optimizer.zero_grad()
            backward(model, 10 * step + 4)
            optimizer.step()


def clipped_and_dropped(model: Any, wasted: Wasted) -> None:
    optimizer = sgd(model)
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        spike = step % 3 == 2
        with wasted() if spike else contextlib.nullcontext():
            backward(model, step, 1000.0 if spike else 1.0)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if spike:
            continue
        optimizer.step()


def cleared_by_hand(model: Any, wasted: Wasted) -> None:
    optimizer = sgd(model)
    for step in range(STEPS):
        backward(model, 10 * step)
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad.data.zero_()
        with wasted():
            backward(model, 10 * step + 1)
        for parameter in model.parameters():
            parameter.grad = None


def cleared_after_the_forward_pass(model: Any, wasted: Wasted) -> None:
    optimizer = sgd(model)
    for step in range(STEPS):
        loss = loss_of(model(rows(2 * step)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with wasted():
            loss = -loss_of(model(rows(2 * step + 1)))
            optimizer.zero_grad()
            loss.backward()


def sam_in_two_calls(model: Any, wasted: Wasted) -> None:
    optimizer = SAM(model)
    backward(model, 100)
    optimizer.second_step()
    for step in range(STEPS):
        with wasted():
            backward(model, step)
        optimizer.first_step()
        backward(model, step)
        optimizer.second_step()


def sam_with_a_closure(model: Any, wasted: Wasted) -> None:
    optimizer = SAM(model)
    backward(model, 100)
    optimizer.second_step()
    for step in range(STEPS):
        with wasted():
            backward(model, step)
        optimizer.step(lambda step=step: backward(model, step))


def with_one_optimizer_for_two_models(model: Any, wasted: Wasted) -> None:
    """As a GAN with one optimizer: it also steps when the gradients of `model` were cleared."""
    other = seeded(nn.Linear(16, 16).double())
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.02)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, 10 * step)
        optimizer.step()
        optimizer.zero_grad()
        with wasted():
            loss_of(model(other(rows(10 * step + 1)))).backward()
        model.zero_grad()
        optimizer.step()


def n_critic_with_two_optimizers(model: Any, wasted: Wasted) -> None:
    """As a GAN whose generator steps after every second step of the critic, which is `model`."""
    generator = DistributedDataParallel(seeded(nn.Linear(16, 16).double(), 1))
    torchcomp.register(generator, TOPK)
    ours, theirs = sgd(model), sgd(generator)
    for step in range(STEPS):
        ours.zero_grad()
        loss_of(model(generator(rows(10 * step)).detach())).backward()
        ours.step()
        if step % 2:
            theirs.zero_grad()
            with wasted():
                loss_of(model(generator(rows(10 * step + 1)))).backward()
            theirs.step()


def with_scaled_losses(model: Any, wasted: Wasted, scaler: Any = None) -> None:
    optimizer = sgd(model)
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model(rows(2 * step))) * (float("inf") if step == 4 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        with wasted():
            scaler.scale(-loss_of(model(rows(2 * step + 1)))).backward()


LOOPS = [
    thrown_away,
    thrown_away_as_zeros,
    several_in_a_row,
    accumulated_and_thrown_away,
    followed_by_no_sync,
    clipped_and_dropped,
    cleared_by_hand,
    cleared_after_the_forward_pass,
    sam_in_two_calls,
    sam_with_a_closure,
    with_one_optimizer_for_two_models,
    n_critic_with_two_optimizers,
]


def outcome(
    loop: Callable[..., None], spec: str, quiet: bool, ddp: Any = None, **options: Any
) -> tuple[Tensor, Any, int]:
    """Run a loop; return weights, slots and step. If `quiet`, the passes are under no_sync."""
    model = wrap(mlp(), **(ddp or {}))
    handle = torchcomp.register(model, spec, **options)
    scaled = {"scaler": options["scaler"]} if "scaler" in options else {}
    loop(model, model.no_sync if quiet else contextlib.nullcontext, **scaled)
    # An ordinary step: it shows what became of the one before.
    optimizer = sgd(model)
    optimizer.zero_grad()
    backward(model, 500)
    optimizer.step()
    state = handle.state_dict()
    return weights(model), state["slots"], state["step"]


def assert_as_under_no_sync(loop: Callable[..., None], spec: str, **options: Any) -> None:
    ours, quiet = (
        on_threads(2, lambda quiet=quiet: outcome(loop, spec, quiet, **options))
        for quiet in (False, True)
    )
    for one, other in zip(ours, quiet, strict=True):
        assert same(one, other)
    assert_replicas_equal([found[0] for found in ours])


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_pass_that_is_thrown_away_is_as_one_under_no_sync(loop: Callable[..., None]) -> None:
    assert_as_under_no_sync(loop, TOPK)


@pytest.mark.parametrize("loop", [several_in_a_row, accumulated_and_thrown_away])
@pytest.mark.parametrize("spec", METHODS[1:])
def test_with_every_kind_of_slot(loop: Callable[..., None], spec: str) -> None:
    assert_as_under_no_sync(loop, spec)


@pytest.mark.parametrize("loop", LOOPS[:4], ids=lambda loop: loop.__name__)
def test_with_gradients_that_are_views_of_buckets(loop: Callable[..., None]) -> None:
    assert_as_under_no_sync(loop, TOPK, ddp={"gradient_as_bucket_view": True})


@pytest.mark.parametrize("options", [{"nodes": 1}, {"check": "late"}], ids=str)
def test_with_options(options: dict[str, Any]) -> None:
    assert_as_under_no_sync(several_in_a_row, TOPK, **options)


def with_a_scaler(quiet: bool) -> Any:
    """With a scaler that skips a step and changes its scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    return outcome(with_scaled_losses, TOPK, quiet, scaler=scaler)[:2]


def unused_branches(skip: bool) -> Any:
    """With parameters that a step does not use."""
    model = wrap(seeded(Branches().double()), find_unused_parameters=True)
    handle, optimizer = torchcomp.register(model, TOPK), sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model(rows(2 * step), ["left", "right"])).backward()
        optimizer.step()
        optimizer.zero_grad()
        if not skip:  # under no_sync, DDP would take the branch for a used one in the next step
            loss_of(model(rows(2 * step + 1), ["left"])).backward()
    optimizer.zero_grad()
    loss_of(model(rows(100), ["right"])).backward()
    optimizer.step()
    return weights(model), handle.state_dict()["slots"]


def test_over_gloo() -> None:
    ours, quiet = (on_processes(2, outcome, several_in_a_row, TOPK, q) for q in (False, True))
    assert same(ours, quiet)


def saved_after_it(quiet: bool) -> Any:
    """A state that is saved after it is that before it."""
    model = wrap(mlp())
    handle = torchcomp.register(model, TOPK)
    thrown_away(model, model.no_sync if quiet else contextlib.nullcontext)
    model.zero_grad()
    state = handle.state_dict()
    told = handle.swap("ef(topk(0.2))")
    return state["slots"], state["step"], told, handle.state_dict()["slots"]


def flushed(quiet: bool, passes: int = 1) -> Any:
    """Throw away the passes that would have sent what a swap has left."""
    model = wrap(mlp())
    handle, optimizer = torchcomp.register(model, TOPK), sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    handle.swap("mean")
    optimizer.zero_grad()
    for number in range(passes):
        with model.no_sync() if quiet else contextlib.nullcontext():
            backward(model, 10 + number)
    optimizer.zero_grad()
    backward(model, 20)
    optimizer.step()
    backward(model, 21)
    state = handle.state_dict()
    return weights(model), state["slots"], state["step"], state["flushing"]


def flushed_in_two_passes(quiet: bool) -> Any:
    return flushed(quiet, 2)


def at_other_learning_rates(quiet: bool) -> Any:
    """Accumulate at learning rates that the residual follows, and throw it all away."""
    model = wrap(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5**6)
    handle = torchcomp.register(model, TOPK, lr_inside=optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, 10 * step)
        optimizer.step()
        optimizer.zero_grad()
        for number in range(3):
            # Powers of 2, so that their ratios are exact.
            optimizer.param_groups[0]["lr"] = 0.5 ** (6 + number + step % 2)
            with model.no_sync() if quiet else contextlib.nullcontext():
                backward(model, 10 * step + 1 + number)
    optimizer.zero_grad()
    backward(model, 100)
    return weights(model), handle.state_dict()["slots"]


RUNS = (
    with_a_scaler,
    unused_branches,
    saved_after_it,
    flushed,
    flushed_in_two_passes,
    at_other_learning_rates,
)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_a_run_is_the_same_with_them_and_without(run: Callable[[bool], Any]) -> None:
    assert same(on_threads(2, run, False), on_threads(2, run, True))


# --- What counts as before ------------------------------------------------------------------------


def accumulated_without_no_sync(model: Any) -> None:
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(3):
            backward(model, 10 * step + number)
        optimizer.step()


def updated_by_hand(model: Any) -> None:
    for step in range(2 * STEPS):
        model.zero_grad()
        backward(model, step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.02 * parameter.grad


def stepped_by_lbfgs(model: Any) -> None:
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=0.1, max_iter=4, tolerance_grad=0, tolerance_change=0
    )

    def closure(step: int) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(rows(step)))
        loss.backward()
        return loss

    for step in range(3):
        optimizer.step(lambda step=step: closure(step))  # type: ignore[arg-type]


def stepped_after_the_next_forward_pass(model: Any) -> None:
    optimizer, loss = sgd(model), None
    # A loss that is linear in the weights, because these change before its backward pass.
    for step in range(STEPS):
        if loss is not None:
            optimizer.zero_grad()
            loss.backward()
        loss = sum(
            (parameter * (step + dist.get_rank() + index)).sum()
            for index, parameter in enumerate(model.parameters())
        )
        model(rows(step))
        optimizer.step()


def cleared_in_part(model: Any) -> None:
    """One of two optimizers clears its gradients; the other steps on its own."""
    first, last = sgd(model.module[0]), sgd(model.module[-1])
    for step in range(STEPS):
        backward(model, step)
        first.zero_grad()
        last.step()
        last.zero_grad()


def with_gradients_of_zero(model: Any) -> None:
    """Most gradients of a step are 0, and the next step adds to them."""
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, 2 * step, 1e-3)
        backward(model, 2 * step + 1)
        optimizer.step()


def updated_by_hand_after_an_optimizer(model: Any) -> None:
    """What once stepped on these parameters is gone: something else updates them."""
    optimizer = sgd(model)
    backward(model, 100)
    optimizer.step()
    del optimizer
    updated_by_hand(model)


def stepped_by_a_graph(model: Any) -> None:
    """An optimizer that can be captured may be replayed without being seen."""
    optimizer = sgd(model)
    optimizer.param_groups[0]["capturable"] = True
    replayed = torch.optim.SGD.step.__wrapped__  # without the hooks
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, step)
        if step:
            replayed(optimizer)
        else:
            optimizer.step()


COUNTING = [
    updated_by_hand_after_an_optimizer,
    stepped_by_a_graph,
    accumulated_without_no_sync,
    updated_by_hand,
    stepped_by_lbfgs,
    stepped_after_the_next_forward_pass,
    cleared_in_part,
    with_gradients_of_zero,
]


def counted(loop: Callable[[Any], None], spec: str) -> Any:
    model = wrap(mlp())
    handle = torchcomp.register(model, spec)
    loop(model)
    state = handle.state_dict()
    return weights(model), state["slots"], state["step"], residual_norm(handle)


def stepped_by_a_compiled_optimizer() -> Any:
    model = wrap(mlp())
    handle, optimizer = torchcomp.register(model, TOPK), sgd(model)
    step_of = torch.compile(lambda: optimizer.step(), backend="eager")
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, step)
        step_of()
    return handle.state_dict()["step"], handle._discarded.open


def test_a_compiled_optimizer_is_seen() -> None:
    assert on_processes(2, stepped_by_a_compiled_optimizer) == [(STEPS, False)] * 2


@pytest.mark.parametrize("loop", COUNTING, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("spec", [TOPK, "ef(topk(k=1))"])
def test_what_an_optimizer_uses_counts_as_before(loop: Callable[[Any], None], spec: str) -> None:
    ours = on_threads(2, counted, loop, spec)
    with mock.patch.object(Discarded, "settle"):
        before = on_threads(2, counted, loop, spec)
    for one, other in zip(ours, before, strict=True):
        assert same(one, other)


class Deep(nn.Module):
    """Nine large layers whose gradients are small, and a small head whose gradients are large."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(9)])
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.001 * layer(x).tanh()
        return self.head(x)


class Unused(nn.Module):
    """Nine large layers without a gradient, and a small one with one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(9)])
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def steps_of_three_passes(build: Callable[[], nn.Module], spec: str, **options: Any) -> list[int]:
    model = wrap(seeded(build().double()), **options)
    handle = torchcomp.register(model, spec)
    optimizer = sgd(model)
    optimizer.zero_grad()
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    found = []
    for step in (1, 2, 3):
        backward(model, step)
        found.append(handle.averager.step)
    return found


@pytest.mark.parametrize(
    ("build", "spec", "options"),
    [
        (Deep, 'ef(topk(0.01, scope="model"))', {}),
        (Unused, "ef(topk(0.1))", {"static_graph": True}),
    ],
)
def test_passes_add_up_though_the_large_parameters_have_no_gradient(
    build: Callable[[], nn.Module], spec: str, options: dict[str, Any]
) -> None:
    body = partial(steps_of_three_passes, build, spec, **options)
    assert on_threads(2, body) == [[2, 3, 4]] * 2


def test_it_is_logged_once_on_one_rank(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "torchcomp"):
        on_threads(2, outcome, several_in_a_row, TOPK, False)
    found = [r for r in caplog.records if r.name == "torchcomp.ddp.discarded"]
    assert [record.levelno for record in found] == [logging.INFO]
    assert "no_sync" in found[0].getMessage()


def alive_after_training() -> list[bool]:
    """Whether the averager and the handle of a model that was deleted are still there."""
    model = wrap(mlp())
    handle = torchcomp.register(model, TOPK)
    thrown_away(model, contextlib.nullcontext)
    handle.close()
    both = weakref.ref(handle.averager), weakref.ref(handle)
    gc.collect()
    gc.disable()
    try:
        del handle, model
        return [each() is not None for each in both]
    finally:
        gc.enable()


def test_nothing_keeps_a_deleted_model_in_memory() -> None:
    assert on_processes(1, alive_after_training) == [[False, False]]
