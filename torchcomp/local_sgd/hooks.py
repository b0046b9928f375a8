"""Hooks: what local steps change on a model of DDP, and how they find who takes a step."""

import weakref
from collections.abc import Callable, Mapping
from inspect import currentframe
from types import CodeType
from typing import Any

import torch

from torchcomp.ddp.checks import OWNER
from torchcomp.engine.nonfinite import largest_magnitudes

STEP: CodeType = torch.optim.Optimizer.profile_hook_step(print).__code__
"""What torch puts around the step of every class of optimizers; it runs the hooks."""

_QUIET = ("require_backward_grad_sync", "require_forward_param_sync", "broadcast_buffers")
"""With these attributes, DDP would make every rank wait for all others at every step."""


def creates_state(optimizer: torch.optim.Optimizer, kwargs: Mapping[str, Any]) -> bool:
    """Whether torch.distributed.checkpoint takes this step only to create the optimizer's state."""
    # It calls step(closure=None), with learning rate and gradients 0.
    if kwargs.get("closure", ...) is not None or optimizer.state:
        return False
    groups = optimizer.param_groups
    gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    still = all(float(group.get("lr", 0.0)) == 0.0 for group in groups)
    return still and not largest_magnitudes(gradients, torch.device("cpu")).any()


class IdleReducer:
    """DDP's reducer, except that it never prepares for a backward pass, so it reduces nothing."""

    # Scripts set require_backward_grad_sync to accumulate gradients without no_sync, or call the
    # reducer directly, as Accelerate's trigger_sync_in_backward does.

    def __init__(self, reducer: Any) -> None:
        self.reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reducer, name)

    def prepare_for_backward(self, outputs: Any) -> None:
        """Do nothing."""


def set_apart(model: Any, spec: str, *, quiet: bool) -> Callable[[], None]:
    """Name LocalSGD as the owner of `model`, and make DDP `quiet`; return what undoes it."""
    before = {name: getattr(model, name) for name in _QUIET if quiet}
    before |= {OWNER: vars(model)[OWNER]} if OWNER in vars(model) else {}
    for name in _QUIET if quiet else ():
        setattr(model, name, False)
    if quiet:
        model.reducer = IdleReducer(model.reducer)
    setattr(model, OWNER, f"torchcomp.LocalSGD('{spec}')")
    model_ref = weakref.ref(model)

    # It must not refer to the reducer, which keeps the parameters alive where Python's garbage
    # collector cannot see it.
    def undo() -> None:
        model = model_ref()
        if model is not None:
            delattr(model, OWNER)
            for name, value in before.items():
                setattr(model, name, value)
            if quiet:
                model.reducer = model.reducer.reducer

    return undo


def callers(code: CodeType) -> list[Any]:
    """Return the `self` of each running call of the method with this code, innermost first."""
    # No caller may keep a frame: it would keep all tensors of the script's functions alive.
    frame, found = currentframe(), []
    while frame is not None:
        if frame.f_code is code:
            found.append(frame.f_locals.get("self"))
        frame = frame.f_back
    return found
