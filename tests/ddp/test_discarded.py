"""A step whose gradients are thrown away does not count: GANs, SAM, dropped steps.

Such a backward pass must be as one under ``no_sync``, bit for bit.
"""

import contextlib
import gc
import logging
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchcomp
from tests.ddp.runs import TOPK
from tests.support.models import Branches, loss_of, mlp, rows, seeded, weights, wrap
from tests.support.outcomes import assert_replicas_equal, same
from tests.support.ranks import on_processes, on_threads
from torchcomp.ddp.discarded import Discarded

METHODS = ["powersgd(rank=1)", "dgc(topk(0.1))", "ef21(topk(0.1))"]
METHODS += ["bidirectional(topk(0.1), topk(0.1))"]
STEPS = 6
Wasted = Callable[[], AbstractContextManager[Any]]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def backward(model: Any, step: int, times: float = 1.0) -> None:
    (times * loss_of(model(rows(step)))).backward()


def each(model: nn.Module, change: Callable[[Any], None]) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            change(parameter)


class Loop:
    """A training loop, written as letters; see ACTIONS.

    `wasted` makes the context of a backward pass whose gradients are thrown away.
    """

    def __init__(self, model: Any, wasted: Wasted = contextlib.nullcontext) -> None:
        self.model, self.wasted, self.optimizer, self.batch = model, wasted, sgd(model), 0

    def run(self, letters: str) -> None:
        for letter in letters:
            ACTIONS[letter](self)

    def backward(self, times: float = 1.0, within: Wasted = contextlib.nullcontext) -> None:
        self.batch += 1
        with within():
            backward(self.model, self.batch, times)

    def clear_between(self) -> None:
        loss = loss_of(self.model(rows(self.batch)))
        self.optimizer.zero_grad()
        loss.backward()

    def waste_between(self) -> None:
        self.batch += 1
        with self.wasted():
            self.clear_between()


ACTIONS: dict[str, Callable[[Loop], Any]] = {
    "b": lambda loop: loop.backward(),
    "e": lambda loop: loop.backward(1e-3),  # with small gradients
    "n": lambda loop: loop.backward(within=loop.model.no_sync),
    "w": lambda loop: loop.backward(-1.0, loop.wasted),  # thrown away
    "W": lambda loop: loop.backward(1000.0, loop.wasted),  # a spike that is thrown away
    "f": Loop.clear_between,  # cleared between the forward and the backward pass
    "v": Loop.waste_between,  # the same, and thrown away
    "z": lambda loop: loop.optimizer.zero_grad(),
    "o": lambda loop: loop.optimizer.zero_grad(set_to_none=False),
    "h": lambda loop: each(loop.model, lambda p: p.grad.data.zero_()),  # cleared by hand
    "x": lambda loop: each(loop.model, lambda p: setattr(p, "grad", None)),
    "c": lambda loop: nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0),
    "s": lambda loop: loop.optimizer.step(),
    "u": lambda loop: each(loop.model, lambda p: p.sub_(0.02 * p.grad)),  # updated by hand
    # The first and the second step of SAM; by the same amount whatever the gradients are.
    "p": lambda loop: (each(loop.model, lambda p: p.add_(0.01)), loop.run("z")),
    "q": lambda loop: (each(loop.model, lambda p: p.add_(-0.01)), loop.run("sz")),
}


def context(model: Any, quiet: bool) -> Wasted:
    return model.no_sync if quiet else contextlib.nullcontext


# --- Loops that throw gradients away --------------------------------------------------------------


def letters(of_step: Callable[[int], str], first: str = "") -> Callable[..., None]:
    def loop(model: Any, wasted: Wasted = contextlib.nullcontext) -> None:
        steps = Loop(model, wasted)
        steps.run(first)
        for step in range(STEPS):
            steps.run(of_step(step))

    return loop


def one_optimizer_for_two_models(model: Any, wasted: Wasted) -> None:
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


LOOPS = {
    "thrown away": letters(lambda step: "zbszw"),
    "as zeros": letters(lambda step: "obsow"),
    "several in a row": letters(lambda step: "zbszwzwzw"),
    "accumulated": letters(lambda step: "zbsz" + "w" * (1 + step % 3)),
    # The thrown-away gradients also have those of passes that did not exchange.
    "and no_sync": letters(
        lambda step: "znbszw" + "z" * (step % 2) + "n" + ("" if step % 3 else "zbs")
    ),
    "clipped and dropped": letters(lambda step: "zWc" if step % 3 == 2 else "zbcszbcs"),
    "by hand": letters(lambda step: "bshwx"),
    "after the forward pass": letters(lambda step: "fsv"),
    "SAM": letters(lambda step: "wpbq", "bq"),
    "two models": one_optimizer_for_two_models,
}


def outcome(loop: str, spec: str, quiet: bool, ddp: Any = None, **options: Any) -> Any:
    """Run a loop; return weights, slots and step. If `quiet`, the passes are under no_sync."""
    model = wrap(mlp(), **(ddp or {}))
    handle = torchcomp.register(model, spec, **options)
    LOOPS[loop](model, context(model, quiet))
    Loop(model).run("zbs")  # an ordinary step shows what became of the one before
    state = handle.state_dict()
    return weights(model), state["slots"], state["step"]


CASES = [(loop, TOPK, {}) for loop in LOOPS]
CASES += [(loop, spec, {}) for loop in ("several in a row", "accumulated") for spec in METHODS]
CASES += [(loop, TOPK, {"ddp": {"gradient_as_bucket_view": True}}) for loop in list(LOOPS)[:4]]
CASES += [("several in a row", TOPK, options) for options in ({"nodes": 1}, {"check": "late"})]


@pytest.mark.parametrize(("loop", "spec", "options"), CASES)
def test_a_pass_that_is_thrown_away_is_as_one_under_no_sync(
    loop: str, spec: str, options: Any
) -> None:
    ours, quiet = (
        on_threads(2, lambda quiet=quiet: outcome(loop, spec, quiet, **options))
        for quiet in (False, True)
    )
    assert same(ours, quiet)
    assert_replicas_equal([found[0] for found in ours])


def test_over_gloo() -> None:
    ours, quiet = (on_processes(2, outcome, "several in a row", TOPK, q) for q in (False, True))
    assert same(ours, quiet)


# --- Runs with and without such passes ------------------------------------------------------------


def with_a_scaler(quiet: bool) -> Any:
    """With a scaler that skips a step and changes its scale."""
    model = wrap(mlp())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    handle, optimizer = torchcomp.register(model, TOPK, scaler=scaler), sgd(model)
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model(rows(2 * step))) * (float("inf") if step == 4 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        with context(model, quiet)():
            scaler.scale(-loss_of(model(rows(2 * step + 1)))).backward()
    optimizer.zero_grad()
    backward(model, 500)
    return weights(model), handle.state_dict()["slots"]


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


def saved_after_it(quiet: bool) -> Any:
    """A state that is saved after it is that before it."""
    model = wrap(mlp())
    handle = torchcomp.register(model, TOPK)
    LOOPS["thrown away"](model, context(model, quiet))
    model.zero_grad()
    state = handle.state_dict()
    told = handle.swap("ef(topk(0.2))")
    return state["slots"], state["step"], told, handle.state_dict()["slots"]


def flushed(quiet: bool) -> Any:
    """Throw away the two passes that would have sent what a swap has left."""
    model = wrap(mlp())
    handle, loop = torchcomp.register(model, TOPK), Loop(model, context(model, quiet))
    loop.run("zbs" * 3)
    handle.swap("mean")
    loop.run("zwwzbsb")
    state = handle.state_dict()
    return weights(model), state["slots"], state["step"], state["flushing"]


RUNS = with_a_scaler, unused_branches, saved_after_it, flushed


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_a_run_is_the_same_with_them_and_without(run: Callable[[bool], Any]) -> None:
    assert same(on_threads(2, run, False), on_threads(2, run, True))


# --- What counts as before ------------------------------------------------------------------------


def stepped_by_lbfgs(model: Any) -> None:
    options = {"max_iter": 4, "tolerance_grad": 0, "tolerance_change": 0}
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, **options)

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


def updated_by_hand_after_an_optimizer(model: Any) -> None:
    """What once stepped on these parameters is gone: something else updates them."""
    loop = Loop(model)
    loop.run("bs")
    loop.optimizer = mock.Mock(zero_grad=model.zero_grad)
    for _ in range(2 * STEPS):
        loop.run("zbu")


def stepped_by_a_graph(model: Any) -> None:
    """An optimizer that can be captured may be replayed without being seen."""
    loop = Loop(model)
    loop.optimizer.param_groups[0]["capturable"] = True
    replayed = torch.optim.SGD.step.__wrapped__  # without the hooks
    loop.run("zbs")
    for _ in range(STEPS):
        loop.run("zb")
        replayed(loop.optimizer)


COUNTING = {
    "accumulated": letters(lambda step: "zbbbs"),
    # Most gradients of a step are 0, and the next step adds to them.
    "zeros": letters(lambda step: "zebs"),
    "by hand": letters(lambda step: "zbu"),
    "by hand after an optimizer": updated_by_hand_after_an_optimizer,
    "graph": stepped_by_a_graph,
    "LBFGS": stepped_by_lbfgs,
    "after the next forward pass": stepped_after_the_next_forward_pass,
}


def counted(loop: str, spec: str) -> Any:
    model = wrap(mlp())
    handle = torchcomp.register(model, spec)
    COUNTING[loop](model)
    state = handle.state_dict()
    return weights(model), state["slots"], state["step"]


@pytest.mark.parametrize("loop", COUNTING)
@pytest.mark.parametrize("spec", [TOPK, "ef(topk(k=1))"])
def test_what_an_optimizer_uses_counts_as_before(loop: str, spec: str) -> None:
    ours = on_threads(2, counted, loop, spec)
    with mock.patch.object(Discarded, "settle"):
        assert same(ours, on_threads(2, counted, loop, spec))


def stepped_by_a_compiled_optimizer() -> Any:
    model = wrap(mlp())
    handle, loop = torchcomp.register(model, TOPK), Loop(model)
    step_of = torch.compile(lambda: loop.optimizer.step(), backend="eager")
    for _ in range(STEPS):
        loop.run("zb")
        step_of()
    return handle.state_dict()["step"], handle._discarded.open


def test_a_compiled_optimizer_is_seen() -> None:
    assert on_processes(2, stepped_by_a_compiled_optimizer) == [(STEPS, False)] * 2


def test_a_rank_that_alone_clears_its_gradients_is_found() -> None:
    """The ranks compare at the end of the next step: only some of them have taken it back."""

    def body() -> None:
        model = wrap(mlp())
        torchcomp.register(model, TOPK)
        Loop(model).run("zbszb" + ("z" if dist.get_rank() else "s") + "b")

    for error in on_threads(2, body, catch=True):
        assert type(error) is torchcomp.RankMismatchError
        assert "cleared on rank 1" in str(error)


def test_it_is_logged_once_on_one_rank(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "torchcomp"):
        on_threads(2, outcome, "several in a row", TOPK, False)
    found = [r for r in caplog.records if r.name == "torchcomp.ddp.discarded"]
    assert [record.levelno for record in found] == [logging.INFO]
    assert "no_sync" in found[0].getMessage()


def alive_after_training() -> list[bool]:
    """Whether the averager and the handle of a deleted model are there; in a process that ends."""
    model = wrap(mlp())
    handle = torchcomp.register(model, TOPK)
    LOOPS["thrown away"](model)
    handle.close()
    both = weakref.ref(handle.averager), weakref.ref(handle)
    gc.collect()
    gc.disable()
    del handle, model
    return [each() is not None for each in both]


def test_nothing_keeps_a_deleted_model_in_memory() -> None:
    assert on_processes(1, alive_after_training) == [[False, False]]
