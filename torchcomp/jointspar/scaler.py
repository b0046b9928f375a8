"""What a GradScaler must bear with JointSpar: an optimizer all of whose layers are dropped."""

from functools import partial
from typing import Any

import torch
from torch import Tensor


def allow_empty_steps(scaler: torch.amp.GradScaler) -> None:
    """Let optimizers step with this scaler when none of their parameters has a gradient.

    A scaler wants the check of one gradient at least, and raises where there is none to check. Now
    none counts as "no infinity found"; all else stays. Harmless when repeated.

    No public method comes between the gradients and this record, so the private one is wrapped that
    PyTorch's own sharded scaler overrides. A gradient of zeros would satisfy the check as well, but
    with it momentum and weight decay would move a layer that is to stand still.
    """
    scaler._unscale_grads_ = partial(_unscaled, scaler)  # type: ignore[method-assign]


def _unscaled(
    scaler: torch.amp.GradScaler, optimizer: Any, inverse: Tensor, found: Tensor, fp16: bool
) -> dict[torch.device, Tensor]:
    """Whether an infinity was found, by device; `found` comes in as zero."""
    own = type(scaler)._unscale_grads_
    return own(scaler, optimizer, inverse, found, fp16) or {found.device: found}
