"""Hooks: all that local steps install on a model, its optimizers and its GradScaler."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.nn.parallel import DistributedDataParallel

from torchcomp.ddp.checks import OWNER
from torchcomp.errors import UnsupportedModelError
from torchcomp.local_sgd.averages import OverlappedAverages
from torchcomp.local_sgd.local_steps import LocalSteps
from torchcomp.nonfinite import largest_magnitudes

Undo = Callable[[], None]

_OWNER = "torchcomp.LocalSGD"
# Maps a module to the DDP model through which it is averaged. An attribute of the module would not
# do: copy.deepcopy would copy it, and the copy is not averaged.
_CLAIMED: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[DistributedDataParallel]]" = (
    weakref.WeakKeyDictionary()
)


class Hooks:
    """What calls the local steps of a model: installed when this is built, until :meth:`remove`.

    The optimizers' hooks own this object, so that local steps go on if the user keeps no reference
    to LocalSGD. It refers to model and optimizers only weakly: a cycle would keep the process group
    and gloo's threads alive after the interpreter ends.
    """

    def __init__(self, model: DistributedDataParallel, steps: LocalSteps) -> None:
        self._steps = steps
        # How many calls of step() are nested in each optimizer (see _before_step).
        self._depths = [0] * len(steps.optimizers)
        # Whether scaler.step() is running, whether the hooks count the current step, and whether a
        # closure is running.
        self._scaling = self._counts = self._evaluating = False
        # If a change fails, the stack undoes those before it, and the model is as it was.
        with ExitStack() as undo:
            for each in self._changes(model):
                undo.callback(each)
            self._undo = undo.pop_all()
        # For a script that ends, or drops its optimizers, inside a round without close().
        self._finalizer = weakref.finalize(self, steps.clock.warn_inside_round)

    def remove(self) -> None:
        """Remove every hook and restore plain DDP; log a warning if a round is in progress."""
        # A finalizer runs once, so the warning is not repeated.
        self._finalizer()
        self._undo.close()

    def _changes(self, model: DistributedDataParallel) -> Iterator[Undo]:
        """Install each hook and attribute, and yield the function that removes it."""
        steps = self._steps
        # With two levels, DDP continues to reduce gradients and broadcast buffers inside the node.
        local = not steps.method.two_levels
        claim(model)
        yield override(model, OWNER, f"{_OWNER}('{steps.method.spec}')")
        yield model.register_forward_pre_hook(self._before_forward(model, local)).remove
        if local:
            # DDP would reduce gradients in the backward pass and broadcast rank 0's buffers in the
            # forward pass. Either makes every rank wait for all others at every step.
            yield override(model, "require_backward_grad_sync", False)
            yield override(model, "require_forward_param_sync", False)
            yield idle(model)
            yield override(model, "broadcast_buffers", False)
        for index, optimizer in enumerate(steps.optimizers):
            before, after = partial(self._before_step, index), partial(self._after_step, index)
            yield optimizer.register_step_pre_hook(before).remove
            yield optimizer.register_step_post_hook(after).remove
        if isinstance(steps.averages, OverlappedAverages):
            # The stack undoes in reverse: the layers' waiting hooks go before the executor ends.
            yield steps.averages.close
            yield from wait_in_forward(model.module, steps.averages)
        if steps.scaler is not None:
            yield wrap_scaler(steps.scaler, self)

    def _before_forward(self, model: DistributedDataParallel, local: bool) -> Any:
        # copy.deepcopy of the model (for an EMA, say) copies its hooks. Weak references keep it
        # from copying this object with its process group. The copy's forward passes must not count.
        model_ref, self_ref = weakref.ref(model), weakref.ref(self)

        def hook(module: nn.Module, args: Any) -> None:
            hooks = self_ref()
            if hooks is None or module is not model_ref():
                return
            if local:
                # Some scripts set this themselves, to accumulate gradients without no_sync().
                module.require_backward_grad_sync = False
            # Not for evaluation, which often runs on rank 0 alone.
            if module.training and torch.is_grad_enabled():
                hooks._steps.forward = True
            elif not module.training and not torch.is_grad_enabled():
                hooks._steps.warn_of_evaluation()
            if not hooks._evaluating:
                # No optimizer is inside step() here, unless a closure runs this forward pass. Torch
                # calls no hook after a step that raises, so its depth is still above 0: reset it.
                hooks._depths = [0] * len(hooks._depths)

        # Otherwise a compiled model would be compiled again at every step.
        return torch.compiler.disable(hook)  # type: ignore[no-untyped-call]

    def _before_step(
        self, index: int, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._depths[index]:
            # A subclass calls super().step(), for which torch runs the hooks again: one step.
            self._depths[index] += 1
            return None
        # torch.distributed.checkpoint calls step(closure=None). Test for that first, because
        # creates_state() waits for the device.
        creating = kwargs.get("closure", ...) is None and creates_state(optimizer)
        # During scaler.step(), wrap_scaler() counts: a skipped step calls no optimizer hook.
        self._counts = not self._scaling and not creating
        if self._counts:
            self._steps.begin(index)
        # Only now: if begin() raises, the step does not run and the depth must stay 0.
        self._depths[index] = 1
        # The usual call has no argument but the optimizer itself, and nothing to wrap.
        if len(args) == 1 and not kwargs:
            return None
        watched = partial(self._watched, index)
        return tuple(map(watched, args)), {name: watched(a) for name, a in kwargs.items()}

    def _watched(self, index: int, argument: Any) -> Any:
        """Return an argument of ``optimizer.step``, with a closure wrapped to track its calls."""
        if not callable(argument):
            return argument

        def closure() -> Any:
            self._evaluating = True
            try:
                return argument()
            except BaseException:
                self._depths[index] = 0  # torch runs no post hook if step() raises
                raise
            finally:
                self._evaluating = False

        return closure

    def _after_step(
        self, index: int, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> None:
        self._depths[index] -= 1
        # Below 0 if the step itself ran a forward pass outside a closure, which resets the depth.
        if self._depths[index] <= 0:
            self._depths[index] = 0
            if self._counts:
                self._steps.end(index)


class IdleReducer:
    """DDP's reducer, except that it never prepares for a backward pass, so it reduces nothing.

    DDP itself asks for it only if ``require_backward_grad_sync`` is set. Other code calls it
    directly, such as Accelerate's ``trigger_sync_in_backward``.
    """

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def prepare_for_backward(self, outputs: Any) -> None:
        """Do nothing, in place of the reducer's method."""


def idle(model: DistributedDataParallel) -> Undo:
    """Make DDP's reducer idle, and return a function that undoes it."""
    owner: Any = model
    owner.reducer = IdleReducer(owner.reducer)
    model_ref = weakref.ref(owner)

    # It must not refer to the reducer, which keeps the parameters alive where Python's garbage
    # collector cannot see it.
    def undo() -> None:
        alive: Any = model_ref()
        if alive is not None:
            alive.reducer = alive.reducer._reducer

    return undo


def override(owner: object, name: str, value: Any) -> Undo:
    """Set an attribute and return a function that restores it, or deletes it if it is new."""
    # A property (DDP's broadcast_buffers) is not in vars(owner), and has to be set back. Where a
    # class attribute is overridden (GradScaler.step), delete the override instead.
    existed = name in vars(owner) or isinstance(getattr(type(owner), name, None), property)
    before = getattr(owner, name) if existed else None
    setattr(owner, name, value)
    owner_ref = weakref.ref(owner)

    def undo() -> None:
        alive = owner_ref()
        if alive is not None and existed:
            setattr(alive, name, before)
        elif alive is not None:
            delattr(alive, name)

    return undo


def claim(model: DistributedDataParallel) -> None:
    """Require that no other open LocalSGD averages the module of `model`."""
    other = _CLAIMED.get(model.module, lambda: None)()
    # close() removes OWNER from the model, which also ends its claim.
    if str(getattr(other, OWNER, "")).startswith(_OWNER):
        raise UnsupportedModelError(
            "another torchcomp.LocalSGD already averages this module through another "
            "DistributedDataParallel: call close() on that LocalSGD first"
        )
    _CLAIMED[model.module] = weakref.ref(model)


def creates_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this step only creates the optimizer's state, and is not a step of the run.

    If an optimizer has no state, torch.distributed.checkpoint takes such a step, with learning rate
    and gradients 0.
    """
    groups = optimizer.param_groups
    if optimizer.state or any(float(group.get("lr", 0.0)) != 0.0 for group in groups):
        return False
    # The gradients decide: a real step in warm-up can have learning rate 0 as well.
    held = (p.grad for group in groups for p in group["params"])
    gradients = [g for g in held if g is not None]
    # All of them in one call, and a single wait.
    return not gradients or not bool(largest_magnitudes(gradients, gradients[0].device).any())


def wrap_scaler(scaler: torch.amp.GradScaler, hooks: Hooks) -> Undo:
    """Count every ``scaler.step(optimizer)``, skipped or not; return a function that undoes it."""
    # The scaler often outlives this object, and must not keep it alive.
    step, owner = scaler.step, weakref.ref(hooks)

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

    undo = override(scaler, "step", counted)
    mine, scaler_ref = weakref.ref(counted), weakref.ref(scaler)
    # If another LocalSGD has wrapped the scaler since, undo() would remove its wrapper too. Leave
    # both: this one passes the call through once it is closed.
    return lambda: undo() if getattr(scaler_ref(), "step", None) is mine() else None


def wait_in_forward(model: nn.Module, averages: OverlappedAverages) -> Iterator[Undo]:
    """Make every layer of `model`, and ``state_dict``, wait for the averages that they read.

    A layer is a compiled module, or a module with its own parameters. It also waits for the
    parameters of its children, because it can read them without calling the children.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        everything = _waiter(module, averages, None)
        saving = module.register_state_dict_pre_hook(everything)  # type: ignore[no-untyped-call]
        yield saving.remove
    for layer in _layers(model):
        # torch.compile adds this prefix, and the averager's names do not have it.
        needed = {names[id(p)].replace("_orig_mod.", "") for p in layer.parameters()}
        yield layer.register_forward_pre_hook(_waiter(layer, averages, needed)).remove


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    # Wait in front of a whole compiled module. A hook inside it would break its graph. If
    # torch.compile(module) has already compiled it, the hook is not even called (torch 2.13).
    compiled = isinstance(module, OptimizedModule) or module._compiled_call_impl is not None
    if compiled or any(True for _ in module.parameters(recurse=False)):
        yield module
        return
    for child in module.children():
        yield from _layers(child)


def _waiter(module: nn.Module, averages: OverlappedAverages, names: set[str] | None) -> Any:
    owner = weakref.ref(module)

    def wait(module: nn.Module, *args: Any) -> None:
        # copy.deepcopy copies hooks, and a copy of the module has its own parameters.
        if module is owner():
            averages.wait(names)

    return torch.compiler.disable(wait)  # type: ignore[no-untyped-call]
