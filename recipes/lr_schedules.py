"""Learning rates as pure functions of the step, exactly as the recipes' papers state them."""

import math
from collections.abc import Callable
from functools import partial

from settings import Settings

Rate = Callable[[int], float]


def cosine(step: int, *, peak: float, final: float, total: int) -> float:
    """Fall from ``peak`` at step 0 to ``final`` at step ``total`` along half a cosine."""
    return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * step / total))


def linear(step: int, *, peak: float, final: float, total: int) -> float:
    """Fall from ``peak`` at step 0 to ``final`` at step ``total`` along a line."""
    return final + (peak - final) * (1 - step / total)


def step_cosine(step: int, *, peak: float, final: float, total: int) -> float:
    """Round the exponent of the cosine's rate, which must stay above 0, to a power of two."""
    return 2.0 ** round(math.log2(cosine(step, peak=peak, final=final, total=total)))


def stepwise(step: int, *, peak: float, gamma: float, drops: tuple[int, ...]) -> float:
    """Multiply ``peak`` by ``gamma`` at every step in ``drops``."""
    return float(peak * gamma ** sum(step >= drop for drop in drops))


def warmed_up(step: int, *, rate: Rate, peak: float, final: float, steps: int) -> float:
    """Rise linearly from ``final`` to ``peak`` in ``steps`` steps, then follow ``rate``."""
    if step < steps:
        return final + (peak - final) * step / steps
    return rate(step)


DECAYS: dict[str, Callable[..., float]] = {
    "cosine": cosine,
    "linear": linear,
    "step-cosine": step_cosine,
}
"""Decays from the peak at the end of warm-up to the final rate at the end of the run."""


def rate_of(settings: Settings, steps_per_epoch: int) -> Rate:
    """Return the learning rate of every optimizer step, counted from 0."""
    total, warmup = settings.epochs * steps_per_epoch, settings.warmup_steps
    peak, final = settings.lr, settings.final_lr

    def after_warmup(step: int) -> float:
        if settings.schedule == "step":
            drops = tuple(epoch * steps_per_epoch for epoch in settings.milestones)
            return stepwise(step, peak=peak, gamma=settings.gamma, drops=drops)
        decay = DECAYS[settings.schedule]
        return decay(step - warmup, peak=peak, final=final, total=total - warmup)

    return partial(warmed_up, rate=after_warmup, peak=peak, final=final, steps=warmup)
