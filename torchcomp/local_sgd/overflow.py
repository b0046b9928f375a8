"""Overflow: a micro-batch whose scaled gradients overflow is computed again, and not skipped."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchcomp.checks import check_count
from torchcomp.errors import NonFiniteError
from torchcomp.kernels.cast import nan_unless_finite


def backward_until_finite(
    scaler: torch.amp.GradScaler,
    optimizers: Sequence[torch.optim.Optimizer],
    compute: Callable[[], Tensor],
    tries: int,
) -> Tensor:
    """Add the unscaled gradients of a micro-batch to ``.grad``, at the first scale that holds them.

    1. Set aside what ``.grad`` holds, compute the loss, and go backward from it times the scale.
    2. Unscale. If something is not finite, lower the scale (``scaler.update()``) and go to 1.
    3. Add what was set aside.

    The scaler's growth interval then counts micro-batches. Any error leaves ``.grad`` as it was.
    """
    check_count("tries", tries)
    parameters = [p for each in optimizers for group in each.param_groups for p in group["params"]]
    aside = [(p, p.grad.clone()) for p in parameters if p.grad is not None]
    finite = False
    try:
        for _ in range(tries if scaler.is_enabled() else 1):
            for parameter in parameters:
                parameter.grad = None
            loss = compute()
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            found = [nan_unless_finite(p.grad).float() for p in parameters if p.grad is not None]
            finite = not found or bool(torch.stack(found).isfinite().all())
            scaler.update()
            if finite:
                break
    finally:
        for parameter in parameters if not finite else ():
            parameter.grad = None
        for parameter, before in aside:
            parameter.grad = before if parameter.grad is None else parameter.grad.add_(before)
    if not finite:
        raise NonFiniteError(
            f"the gradients of a micro-batch were not finite in {tries} tries, the last one at the "
            f"scale {scaler.get_scale():g}: that is no overflow of the scale; look at the loss and "
            "the data"
        )
    return loss
