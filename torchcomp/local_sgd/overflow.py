"""Overflow: compute a micro-batch again if its scaled gradients overflow, and never skip it."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchcomp.engine.nonfinite import all_finite
from torchcomp.specs.checks import check_count
from torchcomp.specs.errors import NonFiniteError, SpecError, UnsupportedModelError


def backward_until_finite(
    scaler: torch.amp.GradScaler | None,
    optimizers: Sequence[torch.optim.Optimizer],
    compute: Callable[[], Tensor],
    tries: int,
    alone: bool = True,
) -> Tensor:
    """Add the unscaled gradients of a micro-batch to ``.grad``, at the first scale that fits.

    Any error leaves ``.grad`` as it was. `alone`: this rank can repeat a backward pass by itself.
    """
    if scaler is None:
        raise SpecError(
            "sync.backward needs the scaler of the training loop: pass it to "
            "torchcomp.LocalSGD(..., scaler=scaler)",
            "scaler",
        )
    if not alone:
        raise UnsupportedModelError(
            "sync.backward repeats a backward pass on one rank, which process_group does not "
            "allow: the ranks of a node reduce gradients together. Use scaler.step(optimizer), "
            "which skips on all ranks of a node or on none"
        )
    check_count("tries", tries)
    parameters = [p for each in optimizers for group in each.param_groups for p in group["params"]]
    # Set the gradients of earlier micro-batches aside: unscale_() would divide them by the scale a
    # second time. In a copy, because with gradient_as_bucket_view DDP writes into the old .grad.
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
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            # One flag for all gradients, and a single wait for the device.
            found = [p.grad for p in parameters if p.grad is not None]
            finite = not found or bool(all_finite(found, found[0].device))
            # After every try: unscale_() can be called again only after update().
            scaler.update()
            if finite:
                break
    finally:
        # After an error, or if no scale fits, drop this micro-batch's gradients.
        for parameter in parameters if not finite else ():
            parameter.grad = None
        both = [(p.grad, g) for p, g in zip(earlier, aside, strict=True) if p.grad is not None]
        if both:
            torch._foreach_add_(*map(list, zip(*both, strict=True)))
        for parameter, gradient in zip(earlier, aside, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
    if not finite:
        raise NonFiniteError(
            f"the gradients of a micro-batch were not finite in {tries} tries, and the scale is "
            f"now {scaler.get_scale():g}: check the loss and the data"
        )
    return loss
