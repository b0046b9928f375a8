"""register(model, "auto"): time candidates while training uncompressed, and go on with the best."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torchcomp
from tests.support.clock import Clock
from tests.support.logs import messages_of
from tests.support.models import (
    Branches,
    gradients,
    loss_of,
    mlp,
    residual_norm,
    rows,
    seeded,
    weights,
    wrap,
)
from tests.support.outcomes import (
    assert_replicas_equal,
    raised_by,
    reloaded,
    same,
)
from tests.support.ranks import on_processes, on_threads
from torchcomp import Auto, SpecError
from torchcomp.aggregators import Mean
from torchcomp.auto.pace import WINDOW
from torchcomp.bucket import Bucket
from torchcomp.ddp import choosing
from torchcomp.exchange import Exchange
from torchcomp.keys import Key
from torchcomp.state import State

TOPK = "ef(topk(0.1))"
AUTO = Auto(candidates=[TOPK], steps=20)
STEPS = 20
SECONDS = 0.02
"""What the average of a bucket takes on the slow network of these tests."""

BUCKETS = 3  # of the model, see SMALL_BUCKETS
COMPUTE = 0.004
"""What the rest of a step takes."""

_mean = Mean.aggregate


CLOCK = Clock()


@dataclass(frozen=True)
class SlowOnRank1(Mean):
    """Averages as mean does, but takes long on one rank."""

    name = "slow_on_rank_1"

    def aggregate(self, bucket: Bucket, exchange: Exchange, state: State, key: Key) -> None:
        CLOCK.advance(SECONDS * (dist.get_rank() == 1))
        _mean(self, bucket, exchange, state, key)


@pytest.fixture(autouse=True)
def clock() -> Iterator[None]:
    with mock.patch.object(choosing, "mark", CLOCK.mark):
        yield


@pytest.fixture
def slow_mean() -> Iterator[None]:
    """An uncompressed average that takes long, as on a slow network."""

    def slow(self: Mean, *args: Any) -> None:
        CLOCK.advance(SECONDS)
        _mean(self, *args)

    with mock.patch.object(Mean, "aggregate", slow):
        yield


def train(model: Any, steps: int, first: int = 0) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    for step in range(first, first + steps):
        CLOCK.advance(COMPUTE)
        optimizer.zero_grad()
        loss_of(model(rows(step))).backward()
        optimizer.step()


def trained(spec: Any, steps: int, **options: Any) -> tuple[Tensor, str, Any, list[str]]:
    model = wrap(mlp())
    handle = torchcomp.register(model, spec, **options)
    methods = []
    for step in range(steps):
        CLOCK.advance(COMPUTE)
        model.zero_grad()
        loss_of(model(rows(step))).backward()
        methods.append(str(handle.method))
    return gradients(model), str(handle.method), handle.choice, methods


def weights_after(spec: Any, steps: int) -> Tensor:
    model = wrap(mlp())
    torchcomp.register(model, spec)
    train(model, steps)
    return weights(model)


def test_training_is_that_of_mean_bit_for_bit_while_candidates_are_timed(slow_mean: None) -> None:
    auto = Auto(candidates=[TOPK, "powersgd(1)", "bidirectional(topk(0.1), topk(0.1))"])
    steps = 60  # all candidates were timed, and none was chosen yet
    for one, other in zip(
        on_threads(2, weights_after, auto, steps),
        on_threads(2, weights_after, "mean", steps),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_the_fast_candidate_is_chosen_on_a_slow_network(
    slow_mean: None, caplog: pytest.LogCaptureFixture
) -> None:
    found = on_threads(2, trained, AUTO, STEPS + 5)
    for _, method, choice, methods in found:
        assert method == choice.method == TOPK
        assert methods[: choice.step] == ["mean"] * (choice.step - 1) + [TOPK]
        assert choice.step <= STEPS
        assert choice == found[0][2]
        seconds = [choice.seconds["mean"], choice.seconds[TOPK], choice.alone, choice.average]
        average = BUCKETS * SECONDS
        assert seconds == pytest.approx([COMPUTE + average, COMPUTE, COMPUTE, average])
    (message,) = messages_of("ddp.choosing", caplog)
    assert TOPK in message


def test_mean_is_kept_if_no_candidate_is_faster() -> None:
    slow = Auto(candidates=[SlowOnRank1()], steps=20)
    for _, method, choice, _ in on_threads(2, trained, slow, STEPS + 5):
        assert method == choice.method == "mean"
        # Rank 1 alone is slow, and its time counts on both.
        assert choice.seconds["slow_on_rank_1"] == pytest.approx(BUCKETS * SECONDS + COMPUTE)
        assert choice.seconds["mean"] == pytest.approx(COMPUTE)


def test_the_method_that_was_chosen_trains(slow_mean: None) -> None:
    assert_replicas_equal(on_threads(2, weights_after, AUTO, STEPS + 10))


def resumed(at: int) -> list[Any]:
    found = []
    model = wrap(mlp())
    handle = torchcomp.register(model, AUTO)
    train(model, at)
    saved = reloaded([handle.state_dict(), model.state_dict()])
    train(model, 5, at)
    found.append([handle.choice, str(handle.method), weights(model)])
    model = wrap(mlp())
    handle = torchcomp.register(model, AUTO)
    handle.load_state_dict(saved[0])
    model.load_state_dict(saved[1])
    train(model, 5, at)
    found.append([handle.choice, str(handle.method), weights(model)])
    return [saved[0], *found]


def test_a_run_resumes_with_the_choice_bit_for_bit(slow_mean: None) -> None:
    for state, straight, again in on_threads(2, resumed, STEPS + 3):
        assert state["spec"] == TOPK
        assert state["auto"]["phase"] == "watch"
        assert straight[0] == again[0]
        assert straight[0].method == TOPK
        assert same(straight[1:], again[1:])


def test_a_trial_begins_again_after_a_resume(slow_mean: None) -> None:
    for state, straight, again in on_threads(2, resumed, 10):
        assert state["spec"] == "mean"
        assert state["auto"]["phase"] == "trial"
        assert straight[0] is None
        assert again[0] is None
        assert torch.equal(straight[2], again[2])


def loads_another_method() -> list[Any]:
    model = wrap(mlp())
    handle = torchcomp.register(model, "ef(topk(0.2))")
    train(model, 3)
    state = reloaded(handle.state_dict())
    model = wrap(mlp())
    handle = torchcomp.register(model, AUTO)
    handle.load_state_dict(state)
    found: list[Any] = [str(handle.method), residual_norm(handle)]
    train(model, 3)
    found += [str(handle.method), residual_norm(handle)]
    train(model, STEPS)
    return [*found, handle.choice.method]


def test_the_residual_of_another_checkpoint_is_sent_before_the_trial(slow_mean: None) -> None:
    for spec, before, then, after, chosen in on_threads(2, loads_another_method):
        assert (spec, then, chosen) == ("mean", "mean", TOPK)
        assert before > after == 0


@pytest.mark.parametrize(
    "damage",
    [
        {"auto": {}},
        {"auto": {"phase": "trial", "choice": {}, "reference": None}},
        {"auto": {"phase": "watch", "choice": None, "reference": -1}},
        {"spec": "nothing(3)"},
    ],
)
def test_a_damaged_checkpoint_changes_nothing(damage: dict[str, Any]) -> None:
    def body() -> None:
        model = wrap(mlp())
        handle = torchcomp.register(model, AUTO)
        train(model, 2)
        before = handle.state_dict()
        error = raised_by(lambda: handle.load_state_dict({**before, **damage}))
        assert isinstance(error, torchcomp.CheckpointError)
        assert same(handle.state_dict(), before)

    on_threads(2, body)


def slower_later(factor: float) -> tuple[list[str], list[float], Any]:
    """Train, and change the time of a step outside of the exchange after two windows."""
    model = wrap(mlp())
    handle = torchcomp.register(model, AUTO)
    found, norms = [], []
    for step in range(STEPS + 2 * WINDOW + 2 * WINDOW):
        changed = step >= STEPS + WINDOW
        CLOCK.advance(COMPUTE * (factor if changed else 1.0))
        model.zero_grad()
        loss_of(model(rows(step))).backward()
        found.append(str(handle.method))
        norms.append(residual_norm(handle))
    return found, norms, handle.choice


def test_candidates_are_timed_again_when_the_step_time_changes_by_half(
    slow_mean: None, caplog: pytest.LogCaptureFixture
) -> None:
    for methods, norms, choice in on_threads(2, slower_later, 6.0):
        again = methods.index("mean", STEPS)
        assert methods[STEPS:again] == [TOPK] * (again - STEPS)
        assert norms[again + 1] == 0
        assert methods[-1] == choice.method == TOPK
        assert choice.step > again
    assert len(messages_of("ddp.choosing", caplog)) == 3


def test_a_steady_step_time_keeps_the_choice(slow_mean: None) -> None:
    for methods, _, choice in on_threads(2, slower_later, 1.0):
        assert set(methods[STEPS:]) == {TOPK}
        assert choice.step <= STEPS


def with_nan(at: int) -> list[bool]:
    model = wrap(mlp())
    handle = torchcomp.register(model, AUTO)
    found = []
    for step in range(STEPS):
        CLOCK.advance(COMPUTE)
        model.zero_grad()
        loss = loss_of(model(rows(step)))
        (loss * float("nan") if step == at else loss).backward()
        found.append(all(bool(each.isfinite().all()) for each in gradients(model).values()))
    assert handle.choice is not None
    return found


@pytest.mark.parametrize("at", [2, 11])
def test_a_nan_passes_through_a_trial_as_through_plain_ddp(at: int) -> None:
    for found in on_threads(2, with_nan, at):
        assert found == [step != at for step in range(STEPS)]


def raises(at: int) -> list[Any]:
    """DDP itself cannot go on after a backward pass that raised, so another model does."""
    model = wrap(mlp())
    handle = torchcomp.register(model, AUTO)
    train(model, at)
    before = handle.state_dict()

    def fail(grad: Tensor) -> Tensor:
        raise ValueError("planted")

    model.module[0].bias.register_hook(fail)
    loss = loss_of(model(rows(at)))
    assert isinstance(raised_by(loss.backward), ValueError)
    after = handle.state_dict()
    handle.close()
    weights_then = model.state_dict()
    model = wrap(mlp())
    handle = torchcomp.register(model, AUTO)
    handle.load_state_dict(after)
    model.load_state_dict(weights_then)
    train(model, STEPS + 5)
    return [before, after, handle.choice.method]


@pytest.mark.parametrize("at", [2, 12])
def test_a_backward_pass_that_raises_leaves_the_state_before_it(at: int, slow_mean: None) -> None:
    for before, after, method in on_threads(2, raises, at):
        assert same(before, after)
        assert method == TOPK


def swaps() -> tuple[Any, str, str]:
    model = wrap(mlp())
    handle = torchcomp.register(model, AUTO)
    train(model, 12)
    handle.swap("powersgd(1)")
    phase = handle.state_dict()["auto"]["phase"]
    train(model, STEPS)
    return handle.choice, phase, str(handle.method)


def test_a_swap_ends_auto(slow_mean: None) -> None:
    assert on_threads(2, swaps) == [(None, "ended", "powersgd(1)")] * 2


def real_ranks(options: dict[str, Any], nodes: int | None, check: str) -> Any:
    torch.set_num_threads(1)
    module = seeded(Branches()) if options else mlp(torch.float32)
    model = wrap(module, **options)
    handle = torchcomp.register(model, Auto(candidates=[TOPK], steps=20), nodes=nodes, check=check)
    for step in range(STEPS + 4):
        model.zero_grad()
        inputs = rows(step, torch.float32)
        out = model(inputs, ["left"]) if options else model(inputs)
        loss_of(out).backward()
    applied = {n: p.grad for n, p in model.module.named_parameters() if p.grad is not None}
    choice = handle.choice
    handle.close()
    return applied, choice


@pytest.mark.parametrize(
    ("ranks", "options", "nodes", "check"),
    [
        (2, {}, None, "late"),
        (2, {"find_unused_parameters": True}, None, "step"),
        (4, {}, 2, "step"),
    ],
)
def test_gloo_ranks_choose_alike(
    ranks: int, options: dict[str, Any], nodes: int | None, check: str
) -> None:
    found = on_processes(ranks, real_ranks, options, nodes, check)
    for applied, choice in found:
        assert choice == found[0][1]
        assert choice.seconds.keys() == {"mean", TOPK}
        assert same(applied, found[0][0])


@pytest.mark.parametrize(
    "spec",
    [
        "auto(steps=10)",
        "auto(candidates=[ef(topk(2.0))])",
        'auto(candidates=[ef(topk(0.02))], within="1%")',
        "auto(candidates=[every(4)])",
    ],
)
def test_a_choice_that_cannot_be_made_is_refused_before_training(spec: str) -> None:
    def body() -> None:
        error = raised_by(lambda: torchcomp.register(wrap(mlp()), spec))
        assert isinstance(error, SpecError)

    on_threads(2, body)


def test_only_register_takes_auto() -> None:
    def body() -> list[Exception]:
        model = wrap(mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = torchcomp.register(model, "mean")
        return [
            raised_by(lambda: handle.swap("auto")),
            raised_by(lambda: torchcomp.JointSpar(wrap(mlp()), budget=0.5, compress="auto")),
            raised_by(
                lambda: torchcomp.LocalSGD(
                    wrap(mlp()), optimizer, "every(2)", total_steps=4, compress="auto"
                )
            ),
        ]

    for errors in on_threads(2, body):
        assert all(isinstance(error, SpecError) for error in errors)
