"""A GradScaler can skip optimizer steps on one rank; the ranks' step counts stay equal."""

from functools import partial

import pytest
import torch

import torchcomp
from tests.local_sgd import reference
from tests.local_sgd.script import Script, assert_follows, constant, mlp, sgd, synchronised_steps
from tests.support.outcomes import assert_close, assert_refused
from tests.support.ranks import on_processes, on_threads

TOTAL = 8
skips = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


def scaled(overflows, **options):
    """Run a script in which the (rank, step) pairs overflow; return the weights after each step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    script = Script(**{"spec": "every(3)", "total_steps": TOTAL, "scaler": scaler} | options)
    return [
        script.step(step, scale=float("inf") if (script.rank, step) in overflows else 1.0)
        for step in range(TOTAL)
    ]


@skips
@pytest.mark.parametrize(
    "overflows",
    [
        pytest.param({(1, 4)}, id="mid-round"),
        pytest.param({(3, 5)}, id="round-end"),  # the average happens inside a skipped step
        pytest.param({(1, 3), (1, 4), (1, 5)}, id="whole-round"),
        pytest.param({(2, 0)}, id="first", marks=pytest.mark.thorough),
        pytest.param({(0, 7)}, id="last", marks=pytest.mark.thorough),
        pytest.param({(r, 1) for r in range(4)}, id="all-ranks", marks=pytest.mark.thorough),
    ],
)
def test_a_skipped_step_is_skipped_and_nothing_else_changes(overflows):
    runs = on_threads(4, scaled, overflows)
    assert synchronised_steps(runs) == [3, 6, 8]
    expected = reference.local_opt(
        4,
        TOTAL,
        update=reference.Momentum,
        rule=reference.every(3),
        lr=constant,
        skipped=frozenset(overflows),
    )
    assert_follows(runs, expected)


# --- A scaler that was not passed -----------------------------------------------------------------


@skips
@pytest.mark.parametrize("step", [0, TOTAL - 1], ids=["first", "last"])
@pytest.mark.parametrize("passes_another", [False, True])
def test_a_scaler_that_was_not_passed_raises_on_every_rank_before_training(step, passes_another):
    def body():
        scaler = torch.amp.GradScaler("cpu")
        script = Script(scaler=scaler, pass_scaler=passes_another)
        script.scaler = torch.amp.GradScaler("cpu") if passes_another else scaler
        untouched = script.weights()
        try:
            for each in range(TOTAL):
                overflows = (script.rank, each) == (1, step)
                script.step(each, scale=float("inf") if overflows else 1.0)
        finally:
            assert torch.equal(script.weights(), untouched)

    assert_refused(2, body, torchcomp.SpecError, "GradScaler", "scaler=scaler", field="scaler")


def test_a_scaler_that_was_not_passed_leaves_no_rank_waiting():
    for outcome in on_processes(2, partial(scaled, {(1, 0)}, pass_scaler=False), catch=True):
        assert type(outcome) is torchcomp.SpecError, outcome
        assert "scaler=scaler" in str(outcome)


def test_a_disabled_scaler_may_be_passed_or_not():
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for pass_scaler in (True, False):
        runs = on_threads(2, partial(scaled, set(), scaler=scaler, pass_scaler=pass_scaler))
        assert synchronised_steps(runs) == [3, 6, 8]


# --- Other calls of the scaler --------------------------------------------------------------------


def test_gradients_may_be_unscaled_and_clipped_before_the_step():
    def body(scaler):
        script, weights = Script("every(2)", total_steps=4, scaler=scaler), []
        for step in range(4):
            script.optimizer.zero_grad()
            script.backward(step)
            if scaler:
                scaler.unscale_(script.optimizer)
            torch.nn.utils.clip_grad_norm_(script.model.parameters(), 0.1)
            script.optimizer_step()
            weights.append(script.weights())
        return weights

    with_scaler = on_threads(2, lambda: body(torch.amp.GradScaler("cpu", init_scale=4.0)))
    assert synchronised_steps(with_scaler) == [2, 4]
    for mine, wanted in zip(with_scaler, on_threads(2, body, None), strict=True):
        assert_close(torch.stack(mine), torch.stack(wanted))


def test_steps_of_another_optimizer_and_steps_that_the_scaler_refuses_do_not_count():
    def body():
        script, weights = Script("every(2)", total_steps=6, scaler=torch.amp.GradScaler("cpu")), []
        other = mlp()
        other_optimizer = sgd(other.parameters())
        for step in range(5):
            script.optimizer.zero_grad()
            script.backward(step)
            script.scaler.scale(other(torch.ones(1, 6).double()).sum()).backward()
            script.scaler.step(other_optimizer)
            script.scaler.step(script.optimizer)
            with pytest.raises(RuntimeError, match=r"step\(\)"):
                script.scaler.step(script.optimizer)
            script.scaler.update()
            weights.append(script.weights())
        return weights

    assert synchronised_steps(on_threads(2, body)) == [2, 4]
