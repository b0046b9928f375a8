"""The learning rate of every step equals the formula in float64."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from recipes.optimizers import build_optimizer, lr_function
from recipes.settings import Settings
from tests.test_learning_rates import FINAL, by_hand
from torchcomp.specs.learning_rates import DECAYS

STEPS_PER_EPOCH = 10
PEAK = 0.8


def settings(**changes: Any) -> Settings:
    return Settings(**{"epochs": 9, "lr": PEAK, "final_lr": FINAL, "warmup_steps": 20, **changes})


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("warmup", [0, 20])
def test_schedule_of_the_settings_at_every_step(decay: str, warmup: int) -> None:
    lr_at = lr_function(settings(schedule=decay, warmup_steps=warmup), STEPS_PER_EPOCH)
    lrs = [lr_at(t) for t in range(91)]
    np.testing.assert_allclose(lrs, by_hand(decay, total=90, warmup=warmup, peak=PEAK), rtol=1e-12)


def cosine_by_hand(step: int, total: int, warmup: int) -> float:
    if step < warmup:
        return FINAL + (PEAK - FINAL) * step / warmup
    angle = math.pi * (step - warmup) / (total - warmup)
    return FINAL + (PEAK - FINAL) * 0.5 * (1 + math.cos(angle))


def test_cosine_with_warmup_at_every_step() -> None:
    lr_at = lr_function(settings(), STEPS_PER_EPOCH)
    assert [lr_at(t) for t in range(91)] == [cosine_by_hand(t, 90, 20) for t in range(91)]
    assert lr_at(0) == FINAL
    assert lr_at(20) == PEAK
    assert lr_at(90) == FINAL


def test_step_schedule_at_every_step() -> None:
    lr_at = lr_function(settings(schedule="step", milestones=(3, 6), gamma=0.1), STEPS_PER_EPOCH)
    for step in range(90):
        warmup = FINAL + (PEAK - FINAL) * step / 20
        dropped = PEAK * 0.1 ** ((step >= 30) + (step >= 60))
        assert lr_at(step) == (warmup if step < 20 else dropped)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_optimizer_gets_exactly_this_learning_rate(optimizer: str) -> None:
    chosen = settings(optimizer=optimizer)
    lr_at = lr_function(chosen, STEPS_PER_EPOCH)
    made = build_optimizer(chosen, torch.nn.Linear(2, 2))
    scheduler = torch.optim.lr_scheduler.LambdaLR(made, lr_at)
    for step in range(90):
        assert made.param_groups[0]["lr"] == lr_at(step)
        made.step()
        scheduler.step()
