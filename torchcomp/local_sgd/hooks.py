"""Hooks: all that local steps install on a model, its optimizers and its GradScaler."""

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchcomp.ddp.checks import OWNER
from torchcomp.engine.nonfinite import largest_magnitudes
from torchcomp.local_sgd.local_steps import LocalSteps, callers
from torchcomp.local_sgd.overlap import OverlappedAverages, wait_in_forward

_STEP: CodeType = torch.optim.Optimizer.profile_hook_step(print).__code__
"""What torch puts around the step of every class of optimizers; it runs the hooks."""

_QUIET = ("require_backward_grad_sync", "require_forward_param_sync", "broadcast_buffers")
"""With these attributes, DDP would make every rank wait for all others at every step."""


class Hooks:
    """What calls the local steps of a model, until :meth:`remove`.

    The optimizers' hooks own it: local steps go on if the user keeps no reference. It refers to
    model and optimizers weakly: a cycle would keep gloo's threads alive after the interpreter ends.
    """

    def __init__(self, model: DistributedDataParallel, steps: LocalSteps) -> None:
        self._steps = steps
        # Whether scaler.step() is running, and whether the hooks count the current step.
        self._scaling = self._counts = False
        self._undo = ExitStack()  # in reverse: layers stop to wait before the executor ends
        undo = self._undo.callback
        # With two levels, DDP continues to reduce gradients and broadcast buffers inside the node.
        undo(_set_apart(model, steps.method.spec, quiet=not steps.method.two_levels))
        undo(model.register_forward_pre_hook(self._before_forward(model)).remove)
        for index, optimizer in enumerate(steps.optimizers):
            # Not traced: the step of an optimizer can be compiled.
            before, after = (
                torch.compiler.disable(partial(hook, index))  # type: ignore[no-untyped-call]
                for hook in (self._before_step, self._after_step)
            )
            undo(optimizer.register_step_pre_hook(before).remove)
            undo(optimizer.register_step_post_hook(after).remove)
        if isinstance(steps.averages, OverlappedAverages):
            undo(steps.averages.close)
            for handle in wait_in_forward(model.module, steps.averages):
                undo(handle.remove)
        if steps.scaler is not None:
            undo(_count_scaled(steps.scaler, self))
        # For a script that ends, or drops its optimizers, inside a round without close().
        self._finalizer = weakref.finalize(self, steps.clock.warn_inside_round)

    def remove(self) -> None:
        """Remove every hook and restore plain DDP; log a warning if a round is in progress."""
        # A finalizer runs once, so the warning is not repeated.
        self._finalizer()
        self._undo.close()

    def _before_forward(self, model: DistributedDataParallel) -> Any:
        # copy.deepcopy of the model (for an EMA, say) copies its hooks. Weak references keep it
        # from copying this object with its process group. The copy's forward passes must not count.
        model_ref, steps_ref = weakref.ref(model), weakref.ref(self._steps)

        def hook(module: nn.Module, args: Any) -> None:
            steps = steps_ref()
            if steps is not None and module is model_ref():
                # Not for evaluation, which often runs on rank 0 alone.
                if module.training and torch.is_grad_enabled():
                    steps.forward = True
                elif not module.training and not torch.is_grad_enabled():
                    steps.warn_of_evaluation()

        # Otherwise a compiled model would be compiled again at every step.
        return torch.compiler.disable(hook)  # type: ignore[no-untyped-call]

    def _before_step(
        self, index: int, optimizer: torch.optim.Optimizer, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        # During scaler.step(), _count_scaled() counts: a skipped step calls no optimizer hook.
        self._counts = not (self._scaling or (kwargs and creates_state(optimizer, kwargs)))
        if self._counts:
            self._steps.begin(index)

    def _after_step(
        self, index: int, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> None:
        # A subclass can call super().step(), for which torch runs the hooks again: it is one step.
        # It begins as often as torch says, and ends with the outermost call.
        if self._counts and callers(_STEP).count(optimizer) <= 1:
            self._counts = False
            self._steps.end(index)


def creates_state(optimizer: torch.optim.Optimizer, kwargs: Mapping[str, Any]) -> bool:
    """Whether torch.distributed.checkpoint takes this step, only to create the optimizer's state.

    It calls ``step(closure=None)``, with learning rate and gradients 0.
    """
    if kwargs.get("closure", ...) is not None or optimizer.state:
        return False
    groups = optimizer.param_groups
    gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    still = all(float(group.get("lr", 0.0)) == 0.0 for group in groups)
    return still and not largest_magnitudes(gradients, torch.device("cpu")).any()


class IdleReducer:
    """DDP's reducer, except that it never prepares for a backward pass, so it reduces nothing.

    Scripts set ``require_backward_grad_sync`` to accumulate gradients without ``no_sync``, or call
    the reducer directly, as Accelerate's ``trigger_sync_in_backward`` does.
    """

    def __init__(self, reducer: Any) -> None:
        self.reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reducer, name)

    def prepare_for_backward(self, outputs: Any) -> None:
        """Do nothing."""


def _set_apart(model: Any, spec: str, *, quiet: bool) -> Callable[[], None]:
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


def _count_scaled(scaler: torch.amp.GradScaler, hooks: Hooks) -> Callable[[], None]:
    """Count every ``scaler.step(optimizer)``, skipped or not; return what undoes it."""
    # The scaler often outlives this object, and must not keep it alive.
    owner, before = weakref.ref(hooks), vars(scaler).get("step")
    step = scaler.step

    def counted(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        hooks = owner()
        if hooks is None or not hooks._finalizer.alive or optimizer not in hooks._steps.optimizers:
            return step(optimizer, *args, **kwargs)
        index = hooks._steps.optimizers.index(optimizer)
        # Around the call, because a skipped step runs none of the optimizer's hooks.
        hooks._steps.begin(index)
        hooks._scaling = True
        try:
            result = step(optimizer, *args, **kwargs)
        finally:
            hooks._scaling = False
        hooks._steps.end(index)
        return result

    def undo() -> None:
        # Another LocalSGD can have wrapped it since. This wrapper then passes its calls through.
        if vars(scaler).get("step") is counted:
            del scaler.step
            if before is not None:
                scaler.step = before  # type: ignore[method-assign]

    scaler.step = counted  # type: ignore[method-assign]
    return undo
