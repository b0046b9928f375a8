"""The optimizers of the recipes."""

import torch
from torch import nn

from recipes.settings import Settings


def build_optimizer(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer with lr=1."""
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
