"""What the settings say about a step: the optimizer, its learning rate, and mixed precision.

Learning rates are pure functions of the step: the QSR paper's decays, and a step schedule.
"""

from functools import partial

import torch
from torch import nn

from recipes.settings import Settings
from torchcomp.specs.learning_rates import LRFunction, decaying, warmed_up


def build_optimizer(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer with lr=1, which LambdaLR multiplies by the lr of each step."""
    decay = settings.weight_decay
    if settings.optimizer == "adamw":
        betas = (settings.beta1, settings.beta2)
        return torch.optim.AdamW(model.parameters(), lr=1.0, betas=betas, weight_decay=decay)
    return torch.optim.SGD(
        model.parameters(),
        lr=1.0,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        weight_decay=decay,
    )


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


def autocast(settings: Settings, device: torch.device) -> torch.autocast:
    """Return the autocast context of the forward pass. It does nothing with ``--amp off``."""
    dtype = torch.float16 if settings.amp == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, enabled=settings.amp != "off")


def grad_scaler(settings: Settings, device: torch.device) -> torch.amp.GradScaler:
    """Return the loss scaler. It scales only with ``--amp fp16``, whose range is small."""
    return torch.amp.GradScaler(device.type, enabled=settings.amp == "fp16")
