"""Overflow: compute a micro-batch again if its scaled gradients overflow, and never skip it."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchcomp.checks import check_count
from torchcomp.errors import NonFiniteError
from torchcomp.nonfinite import all_finite


def backward_until_finite(
    scaler: torch.amp.GradScaler,
    optimizers: Sequence[torch.optim.Optimizer],
    compute: Callable[[], Tensor],
    tries: int,
) -> Tensor:
    """Add the unscaled gradients of a micro-batch to ``.grad``, at the first scale that fits.

    1. Set the gradients of earlier micro-batches aside, and compute the scaled loss and its
       gradients.
    2. Unscale them. If any is not finite, lower the scale (``scaler.update()``) and repeat from 1.
    3. Add the gradients that were set aside.

    The scaler's growth interval then counts micro-batches. Any error leaves ``.grad`` as it was.
    """
    check_count("tries", tries)
    parameters = [p for each in optimizers for group in each.param_groups for p in group["params"]]
    # 1. Copies away from .grad, where unscale_() would divide them by the scale a second time. With
    # gradient_as_bucket_view, DDP writes into the memory of the old .grad as well.
    earlier = [p for p in parameters if p.grad is not None]
    aside = [torch.empty_like(p.grad) for p in earlier]
    if aside:
        torch._foreach_copy_(aside, [p.grad for p in earlier])
    finite = False
    try:
        # A disabled scaler has no scale to lower, so a second try would give the same result.
        tries = tries if scaler.is_enabled() else 1
        for _ in range(tries):
            for parameter in parameters:
                parameter.grad = None
            loss = compute()
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            # 2. Unscale and test.
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            # One flag for all gradients, and a single wait for the device.
            found = [p.grad for p in parameters if p.grad is not None]
            finite = not found or bool(all_finite(found, found[0].device))
            # After every try: update() also resets the scaler, so that unscale_() can be called
            # again for the next micro-batch.
            scaler.update()
            if finite:
                break
    finally:
        # After an error, or if no scale fits, drop this micro-batch's gradients.
        for parameter in parameters if not finite else ():
            parameter.grad = None
        # 3. Restore the earlier micro-batches, and add them to this one in one call.
        both = [
            (p.grad, before) for p, before in zip(earlier, aside, strict=True) if p.grad is not None
        ]
        if both:
            torch._foreach_add_(*map(list, zip(*both, strict=True)))
        for parameter, before in zip(earlier, aside, strict=True):
            if parameter.grad is None:
                parameter.grad = before
    if not finite:
        raise NonFiniteError(
            f"the gradients of a micro-batch were not finite in {tries} tries, and the scale is "
            f"now {scaler.get_scale():g}: check the loss and the data"
        )
    return loss
