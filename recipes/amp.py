"""Mixed precision: autocast and GradScaler as ``--amp`` selects them."""

import torch

from recipes.settings import Settings


def autocast(settings: Settings, device: torch.device) -> torch.autocast:
    """Return the autocast context of the forward pass. It does nothing with ``--amp off``."""
    dtype = torch.float16 if settings.amp == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, enabled=settings.amp != "off")


def grad_scaler(settings: Settings, device: torch.device) -> torch.amp.GradScaler:
    """Return the loss scaler. It scales only with ``--amp fp16``, whose range is small."""
    return torch.amp.GradScaler(device.type, enabled=settings.amp == "fp16")
