"""Schedules: the steps at which a run synchronises.

They are compared with the paper's numbers, and with a reference that runs step by step.
"""

import math
import re
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchcomp
from torchcomp import ScheduleError, SpecError, sync_steps
from torchcomp.local_sgd.schedules import QSR, SCHEDULES, Every, Horizon, PostLocal, Power, Swap


def warmed_up(decay, step, *, peak, total_steps, warmup_steps, final=1e-6):
    """The paper's learning rate: linear from `final` to `peak`, then a decay back to `final`."""
    if step < warmup_steps:
        return final + (peak - final) * step / warmup_steps
    return decay((step - warmup_steps) / (total_steps - warmup_steps), peak, final)


def cosine(done, peak, final):
    return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * done))


def linear(done, peak, final):
    return final + (peak - final) * (1 - done)


def step_cosine(done, peak, final):
    return 2.0 ** round(math.log2(cosine(done, peak, final)))


DECAYS = {"cosine": cosine, "linear": linear, "step-cosine": step_cosine}


VIT = {"total_steps": 93_600, "warmup_steps": 10_000}
VIT_LARGE_BATCH = {"total_steps": 23_400, "warmup_steps": 2_500}
RESNET152 = {"total_steps": 62_400, "warmup_steps": 1_560}
VIT_RATE = partial(warmed_up, cosine, peak=0.008, **VIT)


def step_by_step(rule, lr, total_steps, warmup_steps=0):
    """Reference: run one step at a time and count down the length of the round.

    `rule` returns the length of the round that begins at a step, from the step and its learning
    rate. During warm-up it is called with an infinite learning rate, at which no rule grows.
    """
    synchronised, left = [], 0
    for step in range(total_steps):
        if left == 0:
            left = rule(step, np.inf if step < warmup_steps else np.float64(lr(step)))
        left -= 1
        if left == 0 or step + 1 == total_steps:
            synchronised.append(step + 1)
            left = 0
    return synchronised


def grows(coef, exponent, h_base, cap=np.inf):
    """The rule of Power, in float64."""

    def rule(step, lr):
        with np.errstate(over="ignore"):
            grown = np.floor((np.float64(coef) / lr) ** exponent)
        return max(h_base, int(min(grown, cap, 1e18)))

    return rule


def round_lengths(steps):
    return [end - start for start, end in zip([0, *steps], steps, strict=False)]


# --- The paper's settings -------------------------------------------------------------------------


# The paper publishes 9,711. The other counts follow from its rule, T, W and learning rates.
@pytest.mark.parametrize(
    ("run", "peak", "alpha", "h_base", "counts"),
    [
        (VIT, 0.008, 0.0175, 4, (9_711, 8_741, 9_880)),
        (VIT, 0.008, 0.0175, 8, (6_461, 6_418, 6_275)),
        (VIT_LARGE_BATCH, 0.016, 0.0175, 4, (3_771, 4_021, 3_688)),
        (VIT_LARGE_BATCH, 0.016, 0.0175, 8, (2_066, 2_268, 2_042)),
        (RESNET152, 0.8, 0.2, 2, (24_792, 27_887, 25_117)),
        (RESNET152, 0.8, 0.25, 4, (12_539, 14_079, 12_620)),
    ],
)
def test_qsr_of_the_papers_settings_equals_a_run_step_by_step(run, peak, alpha, h_base, counts):
    for decay, count in zip(DECAYS.values(), counts, strict=True):
        rate = partial(warmed_up, decay, peak=peak, **run)
        steps = sync_steps(QSR(alpha, h_base), lr=rate, **run)
        assert len(steps) == count
        assert steps == step_by_step(grows(alpha, 2, h_base), rate, **run)
        assert set(round_lengths(steps)[: run["warmup_steps"] // h_base]) == {h_base}
        assert steps[-1] == run["total_steps"]


@pytest.mark.parametrize(
    ("exponent", "coef", "count"),
    # With these coefficients all three rules reach H = 4 at about the same learning rate, 0.00875.
    [(1, 0.035, 13_002), (2, 0.0175, 9_711), (3, 0.0139, 7_834)],
)
def test_linear_quadratic_and_cubic_rules_on_the_papers_vit(exponent, coef, count):
    steps = sync_steps(Power(coef, exponent, 4), lr=VIT_RATE, **VIT)
    assert len(steps) == count
    assert steps == step_by_step(grows(coef, exponent, 4), VIT_RATE, **VIT)


def test_post_local_and_swap_of_half_the_papers_vit():
    half = 46_800
    post_local = sync_steps(PostLocal(half, 8), lr=VIT_RATE, **VIT)
    assert post_local == [*range(1, half + 1), *range(half + 8, 93_601, 8)]
    assert sync_steps(Swap(half), lr=VIT_RATE, **VIT) == [*range(1, half + 1), 93_600]


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


@pytest.mark.parametrize("rule", [QSR(1.0, 2, cap=9), Power(1.0, 2, 2, cap=9)], ids=str)
def test_cap_is_the_longest_round(rule):
    lengths = [rule.period(0, rate, Horizon(100)) for rate in (1.0, 0.5, 0.34, 0.33, 1e-9, 1e-300)]
    assert lengths == [2, 4, 8, 9, 9, 9]


def test_cap_and_base_beyond_the_run_end_with_the_run():
    assert QSR(1.0, 2, cap=10**400).round_end(0, 1e-300, Horizon(100)) == 100
    assert QSR(1.0, 10**400).round_end(0, 1.0, Horizon(100)) == 100


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (PostLocal(switch=3, h=4), [1, 2, 3, 7, 10]),
        (PostLocal(switch=0, h=4), [4, 8, 10]),
        (PostLocal(switch=9, h=4), [*range(1, 11)]),
        (PostLocal(switch=3, h=10**30), [1, 2, 3, 10]),
        (Swap(switch=3), [1, 2, 3, 10]),
        (Swap(switch=0), [10]),
        (Swap(switch=9), [*range(1, 11)]),
    ],
    ids=str,
)
def test_post_local_and_swap_synchronise_less_often_after_the_switch(schedule, expected):
    assert sync_steps(schedule, lr=lambda step: 1.0, total_steps=10) == expected


def test_post_local_and_swap_synchronise_every_step_of_warmup():
    options = {"lr": lambda step: step / 4, "total_steps": 10, "warmup_steps": 4}
    assert sync_steps(PostLocal(4, 3), **options) == [1, 2, 3, 4, 7, 10]
    assert sync_steps(Swap(4), **options) == [1, 2, 3, 4, 10]


@pytest.mark.parametrize("number", [np.float64, np.float32, torch.tensor])
def test_learning_rates_can_be_numbers_of_other_libraries(number):
    for rate in (0.25, 1e-30):
        length = QSR(alpha=1.0, h_base=2).round_end(0, number(rate), Horizon(100))
        assert (type(length), length) == (int, min(100, round(rate**-2)))


def test_learning_rate_is_read_once_per_round():
    calls = []

    def lr(step):
        calls.append(step)
        return 0.5

    steps = sync_steps(QSR(1.0, 2), lr=lr, total_steps=10)
    assert steps == [4, 8, 10]
    assert calls == [0, 4, 8]


@st.composite
def runs(draw):
    total_steps = draw(st.integers(1, 600))
    return {
        "total_steps": total_steps,
        "warmup_steps": draw(st.integers(0, total_steps)),
        "rates": draw(st.lists(st.floats(1e-9, 10), min_size=1, max_size=20)),
        "coef": draw(st.floats(1e-6, 10)),
        "h_base": draw(st.integers(1, 50)),
    }


@settings(deadline=None, derandomize=True, max_examples=300)
@given(runs(), st.sampled_from([0.5, 1, 2, 2.5, 3]), st.none() | st.integers(50, 200))
def test_rules_of_growth_equal_a_run_step_by_step(run, exponent, cap):
    rates, coef, h_base = run.pop("rates"), run.pop("coef"), run.pop("h_base")

    def lr(step):
        return rates[step % len(rates)]

    steps = sync_steps(Power(coef, exponent, h_base, cap), lr=lr, **run)
    plain = grows(coef, exponent, h_base, np.inf if cap is None else cap)
    assert steps == step_by_step(plain, lr, **run)
    if exponent == 2:
        assert steps == sync_steps(QSR(coef, h_base, cap), lr=lr, **run)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(
    st.floats(1e-300, 1e300),
    st.floats(5e-324, 1e300),
    st.integers(1, 50),
    st.sampled_from([2, 2.0]),
)
def test_qsr_is_the_power_rule_of_exponent_two(alpha, rate, h_base, two):
    horizon = Horizon(10**15)
    power = Power(alpha, two, h_base).period(0, rate, horizon)
    assert QSR(alpha, h_base).period(0, rate, horizon) == power


ANY = [Every(1), Every(7), QSR(0.3, 1), QSR(5.0, 8), Power(0.3, 3, 2, cap=5), PostLocal(0, 3)]
ANY += [Swap(0)]


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.sampled_from(ANY), st.integers(1, 500), st.floats(1e-300, 1e300))
def test_run_ends_with_a_synchronisation_and_rounds_have_at_least_one_step(
    schedule, total_steps, rate
):
    steps = sync_steps(schedule, lr=lambda step: rate, total_steps=total_steps)
    assert steps[-1] == total_steps
    assert min(round_lengths(steps)) >= 1


def test_every_registered_schedule_is_tested_here():
    assert {type(schedule) for schedule in ANY} == set(SCHEDULES)


# --- Spec strings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "schedule", "canonical"),
    [
        ("qsr(0.2, 2, 64)", QSR(0.2, 2, cap=64), "qsr(alpha=0.2, h_base=2, cap=64)"),
        ("qsr(alpha=0.2, h_base=2, cap=None)", QSR(0.2, 2), "qsr(alpha=0.2, h_base=2)"),
        ("power(0.2, 3, 2)", Power(0.2, 3, 2), "power(coef=0.2, exponent=3, h_base=2)"),
        ("post_local(30, 8)", PostLocal(30, 8), "post_local(switch=30, h=8)"),
        ("post_local(h=8, switch=30)", PostLocal(30, 8), "post_local(switch=30, h=8)"),
        ("swap(30)", Swap(30), "swap(switch=30)"),
    ],
)
def test_schedule_is_read_and_printed_as_its_spec(text, schedule, canonical):
    parsed = torchcomp.parse(text)
    assert (parsed, str(parsed)) == (schedule, canonical)


# Without the ^, each text is a spec. The caret of the error must be where the ^ is.
@pytest.mark.parametrize(
    ("marked", "words"),
    [
        ("qsr(alpha=^-1, h_base=4)", "^qsr: alpha .*-1$"),
        ("qsr(alpha=1, h_base=4, cap=^0)", "^qsr: cap .* 0$"),
        ("qsr(alpha=1, h_base=4, cap=^8.0)", r"^qsr: cap .*8\.0$"),
        ("qsr(alpha=1, h_base=4, cap=^3)", "^qsr: .*cap=3.*h_base=4"),
        ("power(coef=^nan, exponent=1, h_base=2)", "^power: coef .*nan$"),
        ("power(coef=1, exponent=^0, h_base=2)", "^power: exponent .* 0$"),
        ("power(coef=1, exponent=1, h_base=^0)", "^power: h_base .* 0$"),
        ("power(coef=1, exponent=1, h_base=3, cap=^2)", "^power: .*cap=2.*h_base=3"),
        ("^power(coef=1)", "^power .*'exponent'.*'h_base'"),
        ("post_local(switch=^-1, h=4)", "^post_local: switch .*-1$"),
        ("post_local(switch=3, h=^0)", "^post_local: h .* 0$"),
        ("^post_local(3)", r"^post_local .*'h'.*post_local\(switch=30000, h=8\)"),
        ("swap(^0.5)", r"^swap: switch .*0\.5$"),
        ("^swap", r"^swap .*'switch'.*swap\(switch=30000\)"),
    ],
)
def test_bad_option_is_refused_with_a_caret(marked, words):
    with pytest.raises(SpecError) as caught:
        torchcomp.parse(marked.replace("^", "", 1))
    message, _, caret = str(caught.value).split("\n")
    assert re.search(words, message)
    assert caret.index("^") - 2 == marked.index("^")


# --- Bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [-0.1, math.nan, math.inf, -math.inf, None, "0.1", 10**400])
@pytest.mark.parametrize("schedule", [Every(2), QSR(0.1, 2), PostLocal(4, 2)], ids=str)
def test_impossible_learning_rate_is_an_error_with_its_step(schedule, rate):
    with pytest.raises(ScheduleError, match=rf"step 4\b.*{re.escape(repr(rate))}"):
        sync_steps(schedule, lr=lambda step: rate if step == 4 else 1.0, total_steps=9)


@pytest.mark.parametrize("schedule", [QSR(0.1, 2), Power(0.1, 1, 2)], ids=str)
def test_learning_rate_of_zero_is_an_error_if_the_rule_divides_by_it(schedule):
    with pytest.raises(ScheduleError, match=r"step 4\b.*\b0\b.*warmup_steps"):
        sync_steps(schedule, lr=lambda step: 0.0 if step == 4 else 1.0, total_steps=9)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [(Every(2), [2, 4, 5]), (PostLocal(2, 2), [1, 2, 4, 5]), (Swap(1), [1, 5])],
    ids=str,
)
def test_a_fixed_period_does_not_read_the_learning_rate(schedule, expected):
    assert not schedule.reads_lr
    assert sync_steps(schedule, lr=lambda step: 0.0, total_steps=5) == expected


def test_nan_in_warmup_is_an_error():
    with pytest.raises(ScheduleError, match=r"step 0\b.*nan"):
        sync_steps(QSR(0.1, 2), lr=lambda step: math.nan, total_steps=9, warmup_steps=5)


@pytest.mark.parametrize(
    ("total_steps", "warmup_steps", "words"),
    [
        (0, 0, "^total_steps .* 0$"),
        (-5, 0, "^total_steps .*-5$"),
        (10.5, 0, r"^total_steps .*10\.5$"),
        (True, 0, "^total_steps .*True$"),
        (None, 0, "^total_steps .*None$"),
        ("10", 0, "^total_steps .*'10'$"),
        (10, -1, "^warmup_steps .*-1$"),
        (10, 0.5, r"^warmup_steps .*0\.5$"),
        (10, 11, "^warmup_steps .*total_steps.*11.*10"),
    ],
)
def test_bad_horizon_is_refused(total_steps, warmup_steps, words):
    with pytest.raises(SpecError, match=words):
        sync_steps("every(2)", lr=float, total_steps=total_steps, warmup_steps=warmup_steps)


@pytest.mark.parametrize("switch", [0, 3, 10, 11])
@pytest.mark.parametrize("schedule", [partial(PostLocal, h=2), Swap])
def test_switch_outside_of_the_run_is_refused_before_it(schedule, switch):
    built = schedule(switch)
    words = rf"^{built.name}: switch={switch}\b.*\b4\b.*\b10$"
    with pytest.raises(SpecError, match=words) as caught:
        sync_steps(built, lr=lambda step: math.nan, total_steps=10, warmup_steps=4)
    assert caught.value.field == "switch"


def test_only_a_rule_that_reads_the_learning_rate_needs_it():
    assert sync_steps("every(4)", total_steps=10) == [4, 8, 10]
    with pytest.raises(SpecError, match=r"'qsr.*'.*\blr\b"):
        sync_steps("qsr(alpha=0.2, h_base=4)", total_steps=10)


def test_lr_must_be_a_function_and_a_method_is_not_a_schedule():
    with pytest.raises(SpecError, match=r"^lr .*0\.1$"):
        sync_steps("every(4)", lr=0.1, total_steps=10)
    with pytest.raises(SpecError, match=r"every\(4\).*'ef\(topk\(0\.01\)\)'"):
        sync_steps("ef(topk(0.01))", lr=lambda step: 1.0, total_steps=9)
