"""Hooks: what local steps install on the user's model, optimizers and scaler, and how it goes."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchcomp.local_sgd.progress import Progress
from torchcomp.local_sgd.turns import Turns

Undo = Callable[[], None]
Step = Callable[..., Any]


def override(owner: object, name: str, value: Any) -> Undo:
    """Set an attribute and return what restores it, or removes it where there was none before."""
    existed = name in vars(owner) or isinstance(getattr(type(owner), name, None), property)
    before = getattr(owner, name) if existed else None
    setattr(owner, name, value)
    held = weakref.ref(owner)

    def undo() -> None:
        alive = held()
        if alive is not None and existed:
            setattr(alive, name, before)
        elif alive is not None:
            delattr(alive, name)

    return undo


def count_forwards(model: nn.Module, progress: Progress, turns: Turns) -> Undo:
    """Count the model's forward passes in training; returns what undoes it.

    Those that an optimizer asks for in its turn, as LBFGS does, do not count: ranks may differ.
    """
    # A function and not a method: a copy of the model (an average of weights, say) takes its hooks
    # along, and must neither copy the process group nor count.
    owner = weakref.ref(model)

    def count(module: nn.Module, args: Any) -> None:
        training = module.training and torch.is_grad_enabled() and not turns.running
        if training and module is owner():
            progress.forwards += 1

    # A compiled model would be compiled anew for every count.
    uncompiled = torch.compiler.disable(count)  # type: ignore[no-untyped-call]
    return model.register_forward_pre_hook(uncompiled).remove


def wrap_scaler(scaler: torch.amp.GradScaler, around: Callable[[Step], Step | None]) -> Undo:
    """Put something around ``scaler.step``.

    Args:
        scaler: whose method is replaced.
        around: from ``scaler.step`` as it was, what is called with the same arguments instead.

    Returns:
        What undoes it.
    """
    turn = around(scaler.step)
    undo, mine, held = override(scaler, "step", turn), weakref.ref(turn), weakref.ref(scaler)
    # Another LocalSGD may have wrapped the scaler since, around this one.
    return lambda: undo() if getattr(held(), "step", None) is mine() else None
