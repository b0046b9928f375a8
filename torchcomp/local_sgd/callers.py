"""Callers: on whose behalf ``optimizer.step()`` runs, where only the call stack tells."""

import sys
from collections.abc import Iterator
from types import FrameType

import torch

_SCALER_STEP = torch.amp.GradScaler.step.__code__
# What torch makes of every class's `step` for its hooks: all of them share this code.
_HOOKED_STEP = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__
_DCP = ("torch.distributed.checkpoint.state_dict", "_init_optim_state")


def scaler_at_work() -> torch.amp.GradScaler | None:
    """The GradScaler that makes the step, if one does that is switched on."""
    calls = (frame for frame in _stack() if frame.f_code is _SCALER_STEP)
    scalers = (frame.f_locals["self"] for frame in calls)
    return next((scaler for scaler in scalers if scaler.is_enabled()), None)


def checkpoint_at_work() -> bool:
    """Whether torch.distributed.checkpoint makes it, at rate 0, for the state that it creates.

    ``get_state_dict`` and ``set_state_dict`` do so with an optimizer that holds no state.
    """
    names = ((frame.f_globals.get("__name__"), frame.f_code.co_name) for frame in _stack())
    return _DCP in names


def within_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of the optimizer makes this one: a subclass's, by ``super().step()``.

    torch runs the hooks for both, if the parent class has been used in the process.
    """
    calls = (frame for frame in _stack() if frame.f_code is _HOOKED_STEP)
    return sum(frame.f_locals.get("self") is optimizer for frame in calls) > 1


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back
