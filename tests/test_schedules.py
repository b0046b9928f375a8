"""Schedules: when a run synchronises, against the paper's numbers and a run step by step."""

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchcomp import ScheduleError, SpecError, sync_steps
from torchcomp.schedules import QSR, Every, Horizon


def warmup_cosine(step, *, peak, total_steps, warmup_steps, final=1e-6):
    """The papers' learning rate: linear from `final` to `peak`, then half a cosine back to it."""
    if step < warmup_steps:
        return final + (peak - final) * step / warmup_steps
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * progress))


VIT = {"total_steps": 93_600, "warmup_steps": 10_000}
RESNET152 = {"total_steps": 62_400, "warmup_steps": 1_560}
VIT_RATE = partial(warmup_cosine, peak=0.008, **VIT)
RESNET152_RATE = partial(warmup_cosine, peak=0.8, **RESNET152)


def step_by_step(alpha, h_base, lr, total_steps, warmup_steps):
    """A run one step at a time: count down the round's length, and draw it anew at its end."""
    alpha = np.float64(alpha)
    synchronised, left = [], 0
    for step in range(total_steps):
        if left == 0:
            square = 0.0 if step < warmup_steps else (alpha / np.float64(lr(step))) ** 2
            left = max(h_base, int(min(np.floor(square), 1e18)))
        left -= 1
        if left == 0 or step + 1 == total_steps:
            synchronised.append(step + 1)
            left = 0
    return synchronised


def round_lengths(steps):
    return [end - start for start, end in zip([0, *steps], steps, strict=False)]


# --- The paper's settings -------------------------------------------------------------------------


def test_qsr_of_the_papers_vit_synchronises_9711_times():
    steps = sync_steps("qsr(alpha=0.0175, h_base=4)", lr=VIT_RATE, **VIT)
    assert len(steps) == 9_711
    assert steps == step_by_step(0.0175, 4, VIT_RATE, **VIT)
    assert f"{len(steps) / VIT['total_steps']:.1%}" == "10.4%"


@pytest.mark.parametrize(("alpha", "h_base"), [(0.2, 2), (0.25, 4)])
def test_qsr_of_the_papers_resnet152_equals_a_run_step_by_step(alpha, h_base):
    steps = sync_steps(QSR(alpha, h_base), lr=RESNET152_RATE, **RESNET152)
    assert steps == step_by_step(alpha, h_base, RESNET152_RATE, **RESNET152)
    warmup_rounds = round_lengths(steps)[: RESNET152["warmup_steps"] // h_base]
    assert set(warmup_rounds) == {h_base}
    assert steps[-1] == 62_400


def test_last_rounds_of_qsr_are_thousands_of_steps_long():
    lengths = round_lengths(sync_steps(QSR(0.0175, 4), lr=VIT_RATE, **VIT))
    assert max(lengths) == lengths[-1] == 93_600 - 85_458


# --- The rule -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("h", "total_steps", "expected"),
    [
        (1, 4, [1, 2, 3, 4]),
        (3, 9, [3, 6, 9]),
        (4, 10, [4, 8, 10]),
        (10, 10, [10]),
        (11, 10, [10]),
        (10**30, 10, [10]),
        (1, 1, [1]),
    ],
)
def test_every_synchronises_after_h_steps_and_at_the_end(h, total_steps, expected):
    assert sync_steps(Every(h), lr=lambda step: 1.0, total_steps=total_steps) == expected


@pytest.mark.parametrize(
    ("rate", "length"), [(1.0, 2), (0.5, 4), (0.3, 11), (0.25, 16), (0.125, 64), (1e-300, 100)]
)
def test_qsr_takes_the_square_of_alpha_over_rate_rounded_down(rate, length):
    assert QSR(alpha=1.0, h_base=2).round_end(0, rate, Horizon(100)) == length


def test_round_length_is_fixed_by_its_first_rate():
    rates = [1.0, 0.1, 0.5, *[1e-6] * 7]
    # The rule reads steps 0 and 2 only: the 0.1 of step 1 lies inside the first round.
    assert sync_steps(QSR(1.0, 2), lr=rates.__getitem__, total_steps=10) == [2, 6, 10]


def test_learning_rate_is_read_once_a_round():
    asked = []

    def lr(step):
        asked.append(step)
        return 0.5

    steps = sync_steps(QSR(1.0, 2), lr=lr, total_steps=10)
    assert steps == [4, 8, 10]
    assert asked == [0, 4, 8]


def test_warmup_uses_the_base_whatever_its_rate():
    steps = sync_steps(QSR(1.0, 2), lr=lambda step: 0.1, total_steps=110, warmup_steps=6)
    assert steps == [2, 4, 6, 106, 110]


def test_round_that_begins_inside_warmup_keeps_the_base_beyond_it():
    steps = sync_steps(QSR(1.0, 4), lr=lambda step: 0.25, total_steps=40, warmup_steps=5)
    assert steps == [4, 8, 24, 40]


def test_warmup_may_take_the_whole_run():
    steps = sync_steps(QSR(1.0, 4), lr=lambda step: 1e-6, total_steps=10, warmup_steps=10)
    assert steps == [4, 8, 10]


def test_schedule_is_resumed_by_its_arguments_alone():
    horizon = Horizon(**RESNET152)
    steps = sync_steps(QSR(0.25, 4), lr=RESNET152_RATE, **RESNET152)
    for start, end in zip(steps[::500], steps[1::500], strict=False):
        assert QSR(0.25, 4).round_end(start, RESNET152_RATE(start), horizon) == end


@st.composite
def runs(draw):
    total_steps = draw(st.integers(1, 600))
    return {
        "total_steps": total_steps,
        "warmup_steps": draw(st.integers(0, total_steps)),
        "rates": draw(st.lists(st.floats(1e-9, 10), min_size=1, max_size=20)),
        "alpha": draw(st.floats(1e-6, 10)),
        "h_base": draw(st.integers(1, 50)),
    }


@settings(deadline=None, derandomize=True, max_examples=300)
@given(runs())
def test_qsr_equals_a_run_step_by_step(run):
    rates, alpha, h_base = run.pop("rates"), run.pop("alpha"), run.pop("h_base")

    def lr(step):
        return rates[step % len(rates)]

    steps = sync_steps(QSR(alpha, h_base), lr=lr, **run)
    assert steps == step_by_step(alpha, h_base, lr, **run)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    st.sampled_from([Every(1), Every(7), QSR(0.3, 1), QSR(5.0, 8)]),
    st.integers(1, 500),
    st.floats(1e-300, 1e300),
)
def test_run_ends_with_a_synchronisation_and_rounds_never_shrink_to_nothing(
    schedule, total_steps, rate
):
    steps = sync_steps(schedule, lr=lambda step: rate, total_steps=total_steps)
    assert steps[-1] == total_steps
    assert min(round_lengths(steps)) >= 1


# --- Bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [-0.1, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("schedule", [Every(2), QSR(0.1, 2)], ids=str)
def test_impossible_rate_is_an_error_with_its_step(schedule, rate):
    with pytest.raises(ScheduleError, match=r"the learning rate at step 4 is .* finite number"):
        sync_steps(schedule, lr=lambda step: rate if step == 4 else 1.0, total_steps=9)


def test_rate_of_zero_is_an_error_where_the_rule_divides_by_it():
    with pytest.raises(ScheduleError, match=r"step 4 is 0, and qsr divides by it.*warmup_steps"):
        sync_steps(QSR(0.1, 2), lr=lambda step: 0.0 if step == 4 else 1.0, total_steps=9)


def test_warmup_may_begin_at_a_rate_of_zero():
    steps = sync_steps(QSR(0.1, 2), lr=lambda step: step / 4, total_steps=8, warmup_steps=4)
    assert steps == [2, 4, 6, 8]


def test_a_fixed_period_does_not_read_the_rate():
    assert sync_steps(Every(2), lr=lambda step: 0.0, total_steps=5) == [2, 4, 5]


def test_nan_in_warmup_is_an_error_too():
    with pytest.raises(ScheduleError, match=r"the learning rate at step 0 is nan"):
        sync_steps(QSR(0.1, 2), lr=lambda step: math.nan, total_steps=9, warmup_steps=5)


def test_rate_after_the_last_round_began_is_not_asked_for():
    assert sync_steps(Every(5), lr={0: 1.0, 5: 1.0}.__getitem__, total_steps=8) == [5, 8]


@pytest.mark.parametrize(
    ("total_steps", "warmup_steps", "problem"),
    [
        (0, 0, "total_steps must be a whole number of at least 1, not 0"),
        (-5, 0, "total_steps must be a whole number of at least 1, not -5"),
        (10.0, 0, "total_steps must be a whole number of at least 1, not 10.0"),
        (True, 0, "total_steps must be a whole number of at least 1, not True"),
        (None, 0, "total_steps must be a whole number of at least 1, not None"),
        ("10", 0, "total_steps must be a whole number of at least 1, not '10'"),
        (10, -1, "warmup_steps must be a whole number of at least 0, not -1"),
        (10, 0.5, "warmup_steps must be a whole number of at least 0, not 0.5"),
        (10, 11, "warm-up (11 steps) is longer than the run (10 steps)"),
    ],
)
def test_bad_horizon_is_refused(total_steps, warmup_steps, problem):
    with pytest.raises(SpecError) as caught:
        sync_steps("every(2)", lr=float, total_steps=total_steps, warmup_steps=warmup_steps)
    assert str(caught.value) == problem


def test_a_method_is_no_schedule():
    with pytest.raises(SpecError, match="is a gradient method"):
        sync_steps("ef(topk(0.01))", lr=lambda step: 1.0, total_steps=9)
