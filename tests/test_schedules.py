"""Schedules, compared with the paper's numbers and with a reference that runs step by step."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchcomp
from torchcomp import ScheduleError, SpecError, sync_steps
from torchcomp.local_sgd.schedules import QSR, SCHEDULES, Every, Horizon, PostLocal, Power, Swap


def warmed_up(step, *, peak, total_steps, warmup_steps, final=1e-6):
    """The paper's learning rate: linear from `final` to `peak`, then a cosine back to `final`."""
    if step < warmup_steps:
        return final + (peak - final) * step / warmup_steps
    done = (step - warmup_steps) / (total_steps - warmup_steps)
    return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * done))


VIT = {"total_steps": 93_600, "warmup_steps": 10_000}
VIT_LARGE_BATCH = {"total_steps": 23_400, "warmup_steps": 2_500}
RESNET152 = {"total_steps": 62_400, "warmup_steps": 1_560}


def step_by_step(rule, lr, total_steps, warmup_steps=0):
    """Run one step at a time and count down the length of the round.

    During warm-up, `rule` gets an infinite learning rate, at which no rule grows.
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


# The paper publishes 9,711. The other counts follow from its rule, T, W and learning rates. With
# the last coefficients, the rules of exponents 1 to 3 reach H = 4 at about the same learning rate.
@pytest.mark.parametrize(
    ("run", "peak", "schedule", "count"),
    [
        (VIT, 0.008, QSR(0.0175, 4), 9_711),
        (VIT_LARGE_BATCH, 0.016, QSR(0.0175, 8), 2_066),
        (RESNET152, 0.8, QSR(0.25, 4), 12_539),
        (VIT, 0.008, Power(0.035, 1, 4), 13_002),
        (VIT, 0.008, Power(0.0139, 3, 4), 7_834),
    ],
)
def test_the_papers_settings_equal_a_run_step_by_step(run, peak, schedule, count):
    rate, h_base = partial(warmed_up, peak=peak, **run), schedule.h_base
    steps = sync_steps(schedule, lr=rate, **run)
    assert len(steps) == count
    power = (schedule.alpha, 2) if isinstance(schedule, QSR) else (schedule.coef, schedule.exponent)
    assert steps == step_by_step(grows(*power, h_base), rate, **run)
    assert set(round_lengths(steps)[: run["warmup_steps"] // h_base]) == {h_base}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("every(1)", [*range(1, 11)]),
        ("every(4)", [4, 8, 10]),
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
    assert type(parsed) in SCHEDULES
    assert torchcomp.parse(str(parsed)) == parsed
    lr = (lambda step: 1.0) if parsed.reads_lr else None
    assert sync_steps(schedule, lr=lr, total_steps=10) == expected


@pytest.mark.parametrize("number", [np.float64, np.float32, torch.tensor])
def test_learning_rates_can_be_numbers_of_other_libraries(number):
    for rate in (0.25, 1e-30):
        length = QSR(alpha=1.0, h_base=2).round_end(0, number(rate), Horizon(100))
        assert (type(length), length) == (int, min(100, round(rate**-2)))


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


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ("qsr(alpha=-1, h_base=4)", "alpha"),
        ("qsr(alpha=1, h_base=4, cap=3)", "cap"),
        ("power(coef=nan, exponent=1, h_base=2)", "coef"),
        ("power(coef=1, exponent=0, h_base=2)", "exponent"),
        ("power(coef=1, exponent=1, h_base=0)", "h_base"),
        ("post_local(switch=-1, h=4)", "switch"),
        ("post_local(switch=3, h=0)", "h"),
        ("swap(0.5)", "switch"),
    ],
)
def test_an_option_that_is_refused(spec, field):
    with pytest.raises(SpecError, match=rf"^\w+: .*\b{field}\b"):
        torchcomp.parse(spec)


def at_step_4(lr):
    return lambda step: lr if step == 4 else 1.0


# What the error of sync_steps must contain; by default, lr is 1 and total_steps 9.
REFUSED = [
    *(
        ({"schedule": QSR(0.1, 2), "lr": at_step_4(bad)}, ScheduleError, repr(bad))
        for bad in (-0.1, math.nan, None, 10**400)
    ),
    ({"schedule": Power(0.1, 1, 2), "lr": at_step_4(0)}, ScheduleError, "warmup_steps"),
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
