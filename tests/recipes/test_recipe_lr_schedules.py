"""The learning rate of every step is the formula's, in float64."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from lr_schedules import DECAYS, rate_of, warmed_up
from settings import Settings
from train import build_optimizer

import torchcomp

STEPS_PER_EPOCH = 10
PEAK, FINAL = 0.8, 1e-6

# T, W and peak rates of "A Quadratic Synchronization Rule for Distributed Deep Learning".
VIT = {"total": 93_600, "warmup": 10_000, "peak": 0.008}
VIT_LARGE_BATCH = {"total": 23_400, "warmup": 2_500, "peak": 0.016}
RESNET152 = {"total": 62_400, "warmup": 1_560, "peak": 0.8}


def settings(**changes: Any) -> Settings:
    return Settings(**{"epochs": 9, "lr": PEAK, "final_lr": FINAL, "warmup_steps": 20, **changes})


def by_hand(decay: str, *, total: int, warmup: int, peak: float = PEAK) -> np.ndarray:
    """All rates of a run, from step 0 to step `total`: the sheet's formulas over a whole vector."""
    t = np.arange(total + 1, dtype=np.float64)
    done = (t - warmup) / (total - warmup)
    shape = 1 - done if decay == "linear" else (1 + np.cos(np.pi * done)) / 2
    rates = FINAL + (peak - FINAL) * shape
    if decay == "step-cosine":
        rates = np.exp2(np.rint(np.log2(rates)))
    rising = t < warmup
    rates[rising] = FINAL + (peak - FINAL) * t[rising] / warmup
    return rates


def decayed(decay: str, *, total: int, warmup: int, peak: float) -> Any:
    after = partial(DECAYS[decay], peak=peak, final=FINAL, total=total - warmup)
    rate = partial(warmed_up, peak=peak, final=FINAL, steps=warmup)
    return partial(rate, rate=lambda step: after(step - warmup))


@pytest.mark.parametrize("run", [VIT, VIT_LARGE_BATCH, RESNET152])
@pytest.mark.parametrize("decay", DECAYS)
def test_decay_of_the_papers_runs_at_every_step(decay: str, run: dict[str, Any]) -> None:
    rate = decayed(decay, **run)
    rates = np.array([rate(t) for t in range(run["total"] + 1)])
    # A power of two is exact; the others differ by the last bits of NumPy's cosine.
    tolerance = 0 if decay == "step-cosine" else 1e-13
    np.testing.assert_allclose(rates, by_hand(decay, **run), rtol=0, atol=tolerance * run["peak"])
    assert rates[0] == FINAL
    assert rates[-1] == (2.0**-20 if decay == "step-cosine" else FINAL)


def test_step_cosine_falls_by_halves() -> None:
    rate = decayed("step-cosine", **VIT)
    rates = [rate(t) for t in range(VIT["warmup"], VIT["total"] + 1)]
    assert sorted(set(rates), reverse=True) == [2.0**power for power in range(-7, -21, -1)]
    assert rates == sorted(rates, reverse=True)
    # Half a power of two below the peak, 2**-7.5, is where 2**-7 ends.
    last = VIT["warmup"] + rates.count(2.0**-7) - 1
    cosine = decayed("cosine", **VIT)
    assert cosine(last) >= 2**-7.5 > cosine(last + 1)


@pytest.mark.parametrize(
    ("decay", "syncs"), [("cosine", 9_711), ("linear", 8_741), ("step-cosine", 9_880)]
)
def test_synchronisations_of_the_papers_vit(decay: str, syncs: int) -> None:
    steps = torchcomp.sync_steps(
        "qsr(alpha=0.0175, h_base=4)",
        lr=decayed(decay, **VIT),
        total_steps=VIT["total"],
        warmup_steps=VIT["warmup"],
    )
    assert len(steps) == syncs


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("warmup", [0, 20])
def test_schedule_of_the_settings_at_every_step(decay: str, warmup: int) -> None:
    rate = rate_of(settings(schedule=decay, warmup_steps=warmup), STEPS_PER_EPOCH)
    rates = [rate(t) for t in range(91)]
    np.testing.assert_allclose(rates, by_hand(decay, total=90, warmup=warmup), rtol=1e-12)


def cosine_by_hand(step: int, total: int, warmup: int) -> float:
    if step < warmup:
        return FINAL + (PEAK - FINAL) * step / warmup
    angle = math.pi * (step - warmup) / (total - warmup)
    return FINAL + (PEAK - FINAL) * 0.5 * (1 + math.cos(angle))


def test_cosine_with_warmup_at_every_step() -> None:
    rate = rate_of(settings(), STEPS_PER_EPOCH)
    assert [rate(t) for t in range(91)] == [cosine_by_hand(t, 90, 20) for t in range(91)]
    assert rate(0) == FINAL
    assert rate(20) == PEAK
    assert rate(90) == FINAL


def test_cosine_without_warmup_starts_at_the_peak() -> None:
    rate = rate_of(settings(warmup_steps=0), STEPS_PER_EPOCH)
    assert [rate(t) for t in range(91)] == [cosine_by_hand(t, 90, 0) for t in range(91)]


def test_step_schedule_at_every_step() -> None:
    rate = rate_of(settings(schedule="step", milestones=(3, 6), gamma=0.1), STEPS_PER_EPOCH)
    for step in range(90):
        warm = FINAL + (PEAK - FINAL) * step / 20
        dropped = PEAK * 0.1 ** ((step >= 30) + (step >= 60))
        assert rate(step) == (warm if step < 20 else dropped)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_optimizer_gets_exactly_that_rate(optimizer: str) -> None:
    chosen = settings(optimizer=optimizer)
    rate = rate_of(chosen, STEPS_PER_EPOCH)
    made = build_optimizer(chosen, torch.nn.Linear(2, 2))
    scheduler = torch.optim.lr_scheduler.LambdaLR(made, rate)
    for step in range(90):
        assert made.param_groups[0]["lr"] == rate(step)
        made.step()
        scheduler.step()
