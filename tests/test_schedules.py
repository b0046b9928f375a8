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

ERROR = ScheduleError


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


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("every(1)", [*range(1, 11)]),
        ("every(4)", [4, 8, 10]),
        ("every(11)", [10]),
        (Every(10**30), [10]),
        ("post_local(3, 4)", [1, 2, 3, 7, 10]),
        ("post_local(h=4, switch=0)", [4, 8, 10]),
        (PostLocal(switch=3, h=10**30), [1, 2, 3, 10]),
        ("swap(3)", [1, 2, 3, 10]),
        (Swap(switch=0), [10]),
        ("qsr(2.0, 1, 3)", [3, 6, 9, 10]),
        ("qsr(alpha=2.0, h_base=1, cap=None)", [4, 8, 10]),
        ("power(2.0, 1, 1)", [2, 4, 6, 8, 10]),
    ],
    ids=str,
)
def test_the_ends_of_rounds_of_a_run_of_10_steps(schedule, expected):
    parsed = torchcomp.parse(schedule) if isinstance(schedule, str) else schedule
    assert torchcomp.parse(str(parsed)) == parsed
    lr = (lambda step: 1.0) if parsed.reads_lr else None
    assert sync_steps(schedule, lr=lr, total_steps=10) == expected


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


# Without the ^, each text is a spec. The caret of the error must be where the ^ is.
@pytest.mark.parametrize(
    ("marked", "words"),
    [
        ("qsr(alpha=^-1, h_base=4)", "^qsr: alpha .*-1$"),
        ("qsr(alpha=1, h_base=4, cap=^8.0)", r"^qsr: cap .*8\.0$"),
        ("qsr(alpha=1, h_base=4, cap=^3)", "^qsr: .*cap=3.*h_base=4"),
        ("power(coef=^nan, exponent=1, h_base=2)", "^power: coef .*nan$"),
        ("power(coef=1, exponent=^0, h_base=2)", "^power: exponent .* 0$"),
        ("power(coef=1, exponent=1, h_base=^0)", "^power: h_base .* 0$"),
        ("^power(coef=1)", "^power .*'exponent'.*'h_base'"),
        ("post_local(switch=^-1, h=4)", "^post_local: switch .*-1$"),
        ("post_local(switch=3, h=^0)", "^post_local: h .* 0$"),
        ("swap(^0.5)", r"^swap: switch .*0\.5$"),
    ],
)
def test_bad_option_is_refused_with_a_caret(marked, words):
    with pytest.raises(SpecError) as caught:
        torchcomp.parse(marked.replace("^", "", 1))
    message, _, caret = str(caught.value).split("\n")
    assert re.search(words, message)
    assert caret.index("^") - 2 == marked.index("^")


def at_step_4(lr):
    return lambda step: lr if step == 4 else 1.0


# What the error of sync_steps must contain; by default, lr is 1 and total_steps 9.
REFUSED = [
    *(
        (
            {"schedule": schedule, "lr": lambda step, bad=bad: bad if step == 4 else 1.0},
            ERROR,
            repr(bad),
        )
        for bad in (-0.1, math.nan, -math.inf, None, "0.1", 10**400)
        for schedule in (Every(2), QSR(0.1, 2))
    ),
    ({"schedule": Power(0.1, 1, 2), "lr": at_step_4(0)}, ERROR, "warmup_steps"),
    ({"schedule": QSR(0.1, 2), "lr": lambda step: math.nan, "warmup_steps": 5}, ERROR, "step 0"),
    ({"schedule": Swap(3), "warmup_steps": 4}, SpecError, "switch=3"),
    ({"schedule": PostLocal(10, 2), "total_steps": 10}, SpecError, "switch=10"),
    ({"schedule": QSR(0.1, 2), "lr": None}, SpecError, "lr"),
    ({"schedule": Every(2), "lr": 0.1}, SpecError, "0.1"),
    ({"schedule": "ef(topk(0.01))"}, SpecError, "'ef(topk(0.01))'"),
]


@pytest.mark.parametrize(("arguments", "error", "word"), REFUSED)
def test_what_is_refused(arguments, error, word):
    options = {"lr": lambda step: 1.0, "total_steps": 9} | arguments
    with pytest.raises(error) as caught:
        sync_steps(options.pop("schedule"), **options)
    assert word in str(caught.value)
