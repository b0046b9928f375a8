"""Hooks: what local steps install on the user's model, optimizers and scaler, and how it goes."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchcomp.ddp.checks import trained_parameters
from torchcomp.errors import UnsupportedModelError
from torchcomp.local_sgd.batches import Batches
from torchcomp.local_sgd.turns import Turns

Undo = Callable[[], None]
Step = Callable[..., Any]

# By module, the model through which it is averaged. Not an attribute of the module, which a copy of
# it would have, too.
_CLAIMED: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[DistributedDataParallel]]" = (
    weakref.WeakKeyDictionary()
)


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


def claim(model: DistributedDataParallel) -> Undo:
    """Let no other LocalSGD average the module of a model; returns what undoes it.

    Raises:
        UnsupportedModelError: if one does already, through another DistributedDataParallel.
    """
    other = _CLAIMED.get(model.module)
    if other is not None and other() is not None:
        raise UnsupportedModelError(
            "another torchcomp.LocalSGD averages this module already, through another "
            "DistributedDataParallel around it: close() that one before"
        )
    _CLAIMED[model.module] = weakref.ref(model)
    held = weakref.ref(model.module)

    def undo() -> None:
        alive = held()
        if alive is not None:
            _CLAIMED.pop(alive, None)

    return undo


def watch_batches(model: DistributedDataParallel, batches: Batches, turns: Turns) -> Iterator[Undo]:
    """Note the model's forward and backward passes in training; yields what undoes it.

    Those of a closure, which LBFGS evaluates in its turn, do not count, nor do those that
    activation checkpointing makes in a backward pass: ranks may differ.
    """
    # Functions and not methods: a copy of the model (an average of weights, say) takes its hooks
    # along, and must neither copy the process group nor count.
    owner = weakref.ref(model)
    witness = next(parameter for _, parameter in trained_parameters(model))

    def forward(module: nn.Module, args: Any) -> None:
        training = module.training and torch.is_grad_enabled() and not turns.evaluating
        if training and module is owner() and not _in_backward():
            batches.forward(turns.cleared)

    def backward(parameter: Tensor) -> None:
        if not turns.evaluating:
            batches.gradients()

    # A compiled model would be compiled anew for every count.
    uncompiled = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
    yield model.register_forward_pre_hook(uncompiled).remove
    yield witness.register_post_accumulate_grad_hook(backward).remove  # type: ignore[no-untyped-call]


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


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
