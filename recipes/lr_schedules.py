"""Learning rates as pure functions of the step: the QSR paper's decays, and a step schedule."""

from functools import partial

from recipes.settings import Settings
from torchcomp.specs.learning_rates import LRFunction, decaying, warmed_up


def step_decay(step: int, *, peak: float, gamma: float, drops: tuple[int, ...]) -> float:
    """Multiply ``peak`` by ``gamma`` once for every step in ``drops`` that has been reached."""
    return float(peak * gamma ** sum(step >= drop for drop in drops))


def lr_function(settings: Settings, steps_per_epoch: int) -> LRFunction:
    """Return the learning rate as a function of the optimizer step, counted from 0."""
    peak, final, warmup = settings.lr, settings.final_lr, settings.warmup_steps
    if settings.schedule != "step":
        total = settings.epochs * steps_per_epoch
        return decaying(
            settings.schedule, peak=peak, final=final, total_steps=total, warmup_steps=warmup
        )
    # --milestones counts epochs of the run, so warm-up does not shift the drops.
    drops = tuple(epoch * steps_per_epoch for epoch in settings.milestones)
    after_warmup = partial(step_decay, peak=peak, gamma=settings.gamma, drops=drops)
    return partial(warmed_up, after=after_warmup, peak=peak, final=final, steps=warmup)
