"""Learning rates of the recipes as pure functions of the step: the papers' decays, and drops."""

from functools import partial

from recipes.settings import Settings
from torchcomp.learning_rates import LRFunction, decaying, warmed_up


def stepwise(step: int, *, peak: float, gamma: float, drops: tuple[int, ...]) -> float:
    """Multiply ``peak`` by ``gamma`` at every step in ``drops``."""
    return float(peak * gamma ** sum(step >= drop for drop in drops))


def rate_of(settings: Settings, steps_per_epoch: int) -> LRFunction:
    """Return the learning rate of every optimizer step, counted from 0."""
    peak, final, warmup = settings.lr, settings.final_lr, settings.warmup_steps
    if settings.schedule != "step":
        total = settings.epochs * steps_per_epoch
        return decaying(
            settings.schedule, peak=peak, final=final, total_steps=total, warmup_steps=warmup
        )
    drops = tuple(epoch * steps_per_epoch for epoch in settings.milestones)
    after_warmup = partial(stepwise, peak=peak, gamma=settings.gamma, drops=drops)
    return partial(warmed_up, rate=after_warmup, peak=peak, final=final, steps=warmup)
