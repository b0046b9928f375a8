"""LocalSGD: local optimizer steps, and an average of the parameters when the schedule says so."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.parallel import DistributedDataParallel

from torchcomp.component import Component
from torchcomp.ddp.checks import OWNER, check_is_ddp
from torchcomp.errors import SpecError, UnsupportedModelError
from torchcomp.local_sgd.averages import OverlappedAverages
from torchcomp.local_sgd.options import ProcessGroup, Specs, check_arguments, ranks_of
from torchcomp.local_sgd.overflow import backward_until_finite
from torchcomp.local_sgd.rounds import LocalSteps
from torchcomp.outer_steps import OuterStep
from torchcomp.schedules import Schedule
from torchcomp.stats import Stats

Undo = Callable[[], None]

_OWNER = "torchcomp.LocalSGD"
# By module, the model through which it is averaged. Not an attribute of the module, which a copy of
# it would have, too.
_CLAIMED: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[DistributedDataParallel]]" = (
    weakref.WeakKeyDictionary()
)


class LocalSGD:
    """Train with local steps; average the parameters whenever the schedule ends a round.

    Algorithm 2 ("Local OPT") of Gu et al., ICLR 2024 (arXiv 2310.14423), with the schedule's rule
    for H. Each rank steps its own optimizer on its own gradients, which are not exchanged.

    1. At the first step of a round, read the learning rate and fix the round's length H.
    2. Take H local steps.
    3. Average the parameters over the ranks, in float32 or wider. Repeat; the last round is cut so
       that the run ends with an average at exactly ``total_steps``.

    ``compress`` averages the *pseudo-gradients* instead: what local steps have added since the last
    synchronisation. ``outer`` takes an outer optimizer's step along their mean. Both keep the
    parameters of the last synchronisation, in float32 or wider; whatever else changes the
    parameters is part of the next pseudo-gradient. After every synchronisation, all ranks hold the
    same parameters bit for bit.

    Momentum and Adam moments stay local unless ``moments`` says otherwise. So do BatchNorm buffers
    (DDP's broadcast is off until :meth:`close`): :func:`torchcomp.reestimate_batchnorm` makes them
    fit averaged weights. An average of weights (EMA) is the same on all ranks if it is updated
    between rounds, where :attr:`next_sync` is None. A parameter that is added to an optimizer
    later, or thawed, is averaged from its first step on, but not reduced by DDP after
    :meth:`close`.

    The training loop stays as it is: hooks on the model and the optimizer do the work. The clock
    counts calls of ``optimizer.step()``, or of ``scaler.step(optimizer)``, skipped or not, because
    a GradScaler skips on one rank and not on another. The average happens inside that call. A rank
    that leaves a batch out without a call is not noticed: from then on it works on other batches
    than the others.

    Args:
        model: a DDP model that :func:`torchcomp.register` does not serve.
        optimizer: any torch optimizer over the model's parameters, or a list of all that train it;
            a step then counts when each has been stepped once. Learning rates must be the same on
            all ranks, which is checked at the first step and at every synchronisation.
        spec: the schedule, such as ``"every(8)"`` or ``"qsr(alpha=0.0175, h_base=4)"``, which reads
            the largest learning rate of the parameter groups; or a list with one for each
            optimizer, whose parameters then have their own rounds.
        total_steps: T, optimizer steps of the run, or of the rest of it if it goes on without
            :meth:`load_state_dict`.
        warmup_steps: W, steps of learning-rate warm-up.
        scaler: the loop's ``GradScaler``. One that is switched on and was not handed over is
            refused at the first step.
        compress: how pseudo-gradients are averaged, by any method that :func:`torchcomp.register`
            takes; ``"mean"`` is the exact mean of the parameters.
        outer: an outer step, ``"slowmo(beta=0.7, alpha=1.0)"`` or ``"nesterov(lr=0.7,
            momentum=0.9)"`` (:class:`torchcomp.local_sgd.SlowMo`, ``Nesterov``); None takes the
            mean itself.
        moments: what a synchronisation does with the optimizers' state: ``"local"`` leaves it
            alone, ``"average"`` averages it uncompressed, ``"reset"`` starts it anew.
        fragments: P, pieces of the parameters that synchronise in turn, P times as often and a P-th
            as much, as in Streaming DiLoCo. Mostly, ranks then hold equal parameters only at the
            end, and no other number of ranks can go on from a checkpoint before it.
        overlap: let the average overlap with what follows the optimizer step. Every layer waits for
            its own parameters, so results are the same bit for bit. Call :meth:`wait` before
            anything else reads parameters: an EMA, or a module without parameters of its own that
            reads those of a child which it does not call.
        process_group: for two levels, a group, or mesh of one dimension such as ``mesh["node"]``,
            that takes one rank of each node. The average runs over it, and DDP reduces gradients at
            every step in its own group, the node.
        seed: seed of the random choices of ``compress``, a whole number of at least 0.

    Raises:
        SpecError: on all ranks, if an option cannot be used, or the first step's scaler was not
            handed over.
        UnsupportedModelError: as for :func:`torchcomp.register`; also from ``optimizer.step()``
            with ``process_group``, if it trains a parameter that DDP does not know.
        RankMismatchError: if the ranks give different arguments; at the first step, if their
            learning rates differ, or, with ``compress``, ``outer`` or ``process_group``, their
            parameters; at a synchronisation, if they have lost step with each other.
        ScheduleError: from ``optimizer.step()``, beyond ``total_steps`` or at a learning rate that
            the schedule cannot use.
        NonFiniteError, WireError: on all ranks, at a synchronisation, if a rank's parameters are
            not finite, or a message was not intact. No parameter has been averaged then, and the
            residual is what it was.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: "torch.optim.Optimizer | Sequence[torch.optim.Optimizer]",
        spec: Specs,
        *,
        total_steps: int,
        warmup_steps: int = 0,
        scaler: "torch.amp.GradScaler | None" = None,
        compress: str | Component = "mean",
        outer: str | OuterStep | None = None,
        moments: str = "local",
        fragments: int = 1,
        overlap: bool = False,
        process_group: "ProcessGroup | None" = None,
        seed: int = 0,
    ) -> None:
        check_is_ddp(model)
        options = {
            **{"spec": spec, "total_steps": total_steps, "warmup_steps": warmup_steps},
            **{"compress": compress, "outer": outer, "moments": moments, "fragments": fragments},
            **{"overlap": overlap, "seed": seed},
        }
        given: Any = optimizer
        optimizers = list(given) if isinstance(given, list | tuple) else [given]
        exchange, two_levels = ranks_of(model, process_group), process_group is not None
        method = exchange.build(
            _OWNER,
            {**options, "process_group": "one of its own" if two_levels else "none"},
            lambda: check_arguments(model, optimizers, scaler, two_levels, options),
        )
        # The optimizer's hooks own this object. It holds model and optimizer weakly: a cycle would
        # keep the process group, and gloo's threads, alive until after the interpreter has ended.
        self._steps = LocalSteps(model, optimizers, method, exchange, scaler)
        # Of each optimizer, how deep it is in its own step; and whether the scaler makes it step,
        # the hooks count the step, or a closure is evaluated.
        self._depths = [0] * len(optimizers)
        self._scaling = self._counts = self._evaluating = False
        with ExitStack() as undo:
            for each in self._changes(model):
                undo.callback(each)
            self._undo = undo.pop_all()
        self._finalizer = weakref.finalize(self, self._steps.clock.warn_inside_round)

    def __repr__(self) -> str:
        return f"<LocalSGD '{self._steps.method.spec}': {self.stats}>"

    @property
    def schedule(self) -> Schedule:
        """The schedule in use, of the first optimizer if each has one; its ``str`` is the spec."""
        return self._steps.method.schedules[0]

    @property
    def next_sync(self) -> int | None:
        """The step, counted from 1, at which a round in progress ends first; None between rounds.

        Between rounds all ranks hold the same parameters: evaluate and save there.
        """
        return self._steps.clock.next_sync

    @property
    def stats(self) -> Stats:
        """Counters of this rank: bytes of the last synchronisation and in all."""
        self.wait()
        return replace(self._steps.averages.averager.stats, steps=self._steps.clock.step)

    def residual_norms(self, slot: str = "error") -> dict[str, float]:
        """Euclidean norms by parameter, as :meth:`torchcomp.Averager.residual_norms`.

        The slot "reference" holds the parameters of the last synchronisation, "outer_momentum" the
        outer momentum.
        """
        return self._steps.averages.averager.residual_norms(slot)

    def wait(self) -> None:
        """With ``overlap``, wait until all parameters have their averages."""
        self._steps.averages.wait()

    def backward(self, compute: Callable[[], Tensor], tries: int = 24) -> Tensor:
        """Add the gradients of a micro-batch to ``.grad``, and compute it again while it overflows.

        The paper's remedy for float16: no rank ever skips an optimizer step. It replaces
        ``scaler.scale(loss).backward()``, once for each micro-batch; gradients are unscaled then,
        so clip them as they are, and call ``optimizer.step()``, not ``scaler.step(optimizer)``::

            optimizer.zero_grad()
            loss = sync.backward(lambda: criterion(model(inputs), targets))
            optimizer.step()

        Dropout draws anew when a micro-batch is computed again, and BatchNorm counts it twice.

        Args:
            compute: the forward pass of a micro-batch; returns its loss, a scalar, as this does.
            tries: how often to compute at most; the scale is halved each time (``backoff_factor``).

        Raises:
            SpecError: without a scaler.
            UnsupportedModelError: with ``process_group``.
            NonFiniteError: if the gradients are not finite at any of these scales.
        """
        if self._steps.scaler is None:
            raise SpecError(
                "sync.backward works with the scaler of the loop: torchcomp.LocalSGD(..., "
                "scaler=scaler)"
            )
        if self._steps.method.two_levels:
            raise UnsupportedModelError(
                "sync.backward computes again on one rank alone, and with process_group the ranks "
                "of a node reduce their gradients together: there an overflow reaches all of them, "
                "so scaler.step(optimizer) skips on all or on none"
            )
        return backward_until_finite(self._steps.scaler, self._steps.optimizers, compute, tries)

    def state_dict(self) -> dict[str, Any]:
        """This rank's clock, residual and outer momentum: plain tensors, numbers and strings.

        Inside a round, weights and optimizer state differ between ranks, so every rank saves its
        own model, optimizer and this. States saved between rounds fit another number of ranks after
        :func:`torchcomp.redistribute`; with ``fragments``, mostly only at the end of the run.
        torch.distributed.checkpoint keeps one value for each name, so give every rank names of its
        own: ``dcp.save({f"rank{rank}": {"sync": sync.state_dict(), ...}}, checkpoint_id=...)``.

        Raises:
            RuntimeError: where some of several optimizers were stepped, and not all.
        """
        return self._steps.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` of this rank returned; nothing changes on error.

        Load the rank's own weights after ``DistributedDataParallel(...)``, whose constructor copies
        rank 0's to all ranks; the next optimizer step checks that they are those of the checkpoint.

        Raises:
            CheckpointError: if it is another model's, schedule's, run's or rank's, or damaged.
            RuntimeError: where some of several optimizers were stepped, and not all.
        """
        self._steps.load_state_dict(state)

    def close(self) -> None:
        """Remove every hook and give the model back to DDP; harmless when repeated.

        DDP keeps only equal replicas equal. So close between rounds, or a warning says that
        parameters differ. To train on, use ``moments="average"`` or a new optimizer: moments of
        local steps differ between the ranks, and let replicas drift apart without a warning.
        """
        self.wait()
        self._finalizer()
        self._undo.close()

    def __enter__(self) -> "LocalSGD":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _changes(self, model: DistributedDataParallel) -> Iterator[Undo]:
        """Change the user's objects, one by one, and yield what undoes each change."""
        steps = self._steps
        local = not steps.method.two_levels
        claim(model)
        yield override(model, OWNER, f"{_OWNER}('{steps.method.spec}')")
        yield model.register_forward_pre_hook(self._before_forward(model, local)).remove
        if local:
            yield override(model, "require_backward_grad_sync", False)
            yield override(model, "require_forward_param_sync", False)
            yield override(model, "broadcast_buffers", False)
        for index, optimizer in enumerate(steps.optimizers):
            before, after = partial(self._before_step, index), partial(self._after_step, index)
            yield optimizer.register_step_pre_hook(before).remove
            yield optimizer.register_step_post_hook(after).remove
        if isinstance(steps.averages, OverlappedAverages):
            yield steps.averages.close
            yield from wait_in_forward(model.module, steps.averages)
        if steps.scaler is not None:
            yield wrap_scaler(steps.scaler, self)

    def _before_forward(self, model: DistributedDataParallel, local: bool) -> Any:
        # A function and not a method, which knows its model: a copy of the model (an average of
        # weights, say) takes its hooks along, and must neither copy the process group nor count.
        model_ref, self_ref = weakref.ref(model), weakref.ref(self)

        def hook(module: nn.Module, args: Any) -> None:
            sync = self_ref()
            if sync is None or module is not model_ref():
                return
            if local:
                # Some scripts set it themselves, to accumulate gradients without no_sync().
                module.require_backward_grad_sync = False
            if module.training and torch.is_grad_enabled():
                sync._steps.forward = True
            if not sync._evaluating:
                # No optimizer steps now: one whose step has raised is not at it any more.
                sync._depths = [0] * len(sync._depths)

        # A compiled model would be compiled anew for every step.
        return torch.compiler.disable(hook)  # type: ignore[no-untyped-call]

    def _before_step(
        self, index: int, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._depths[index]:
            # torch runs the hooks again for a parent's step that a subclass calls.
            self._depths[index] += 1
            return None
        creating = kwargs.get("closure", ...) is None and creates_state(optimizer)
        self._counts = not self._scaling and not creating
        if self._counts:
            self._steps.begin(index)
        self._depths[index] = 1
        if len(args) == 1 and not kwargs:
            return None
        watched = partial(self._watched, index)
        return tuple(map(watched, args)), {name: watched(a) for name, a in kwargs.items()}

    def _watched(self, index: int, argument: Any) -> Any:
        """An argument of ``optimizer.step``; of a closure, one that says when it is evaluated."""
        if not callable(argument):
            return argument

        def closure() -> Any:
            self._evaluating = True
            try:
                return argument()
            except BaseException:
                self._depths[index] = 0  # as there is no hook after a step that raises
                raise
            finally:
                self._evaluating = False

        return closure

    def _after_step(
        self, index: int, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> None:
        self._depths[index] -= 1
        if self._depths[index] <= 0:
            self._depths[index] = 0
            if self._counts:
                self._steps.end(index)


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


def claim(model: DistributedDataParallel) -> None:
    """Require that no other LocalSGD averages the module of a model, until this one is closed."""
    other = _CLAIMED.get(model.module, lambda: None)()
    if str(getattr(other, OWNER, "")).startswith(_OWNER):
        raise UnsupportedModelError(
            "another torchcomp.LocalSGD averages this module already, through another "
            "DistributedDataParallel around it: close() that one before"
        )
    _CLAIMED[model.module] = weakref.ref(model)


def creates_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step does nothing but create the optimizer's state.

    torch.distributed.checkpoint takes one, with a learning rate and gradients of 0, if there is no
    state. A step of a run at a warm-up's learning rate of 0 has gradients.
    """
    groups = optimizer.param_groups
    return (
        not optimizer.state
        and all(float(group.get("lr", 0.0)) == 0.0 for group in groups)
        and not any(p.grad is not None and bool(p.grad.any()) for g in groups for p in g["params"])
    )


def wrap_scaler(scaler: torch.amp.GradScaler, sync: LocalSGD) -> Undo:
    """Let every ``scaler.step(optimizer)`` count, skipped or not; returns what undoes it."""
    step, owner = scaler.step, weakref.ref(sync)

    def counted(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        sync = owner()
        if sync is None or not sync._finalizer.alive or optimizer not in sync._steps.optimizers:
            return step(optimizer, *args, **kwargs)
        index = sync._steps.optimizers.index(optimizer)
        sync._steps.begin(index)
        sync._scaling = True
        try:
            result = step(optimizer, *args, **kwargs)
        finally:
            sync._scaling = False
        sync._steps.end(index)
        return result

    undo, mine, held = override(scaler, "step", counted), weakref.ref(counted), weakref.ref(scaler)
    # Another LocalSGD may have wrapped the scaler since, around this one.
    return lambda: undo() if getattr(held(), "step", None) is mine() else None


def wait_in_forward(model: nn.Module, averages: OverlappedAverages) -> Iterator[Undo]:
    """Let every layer of `model`, and its ``state_dict``, wait for what they read.

    A layer is a compiled module, or one with parameters of its own; it also waits for those
    of its children, which it may read without calling them.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        everything = _waiter(module, averages, None)
        saving = module.register_state_dict_pre_hook(everything)  # type: ignore[no-untyped-call]
        yield saving.remove
    for layer in _layers(model):
        needed = {names[id(p)].replace("_orig_mod.", "") for p in layer.parameters()}
        yield layer.register_forward_pre_hook(_waiter(layer, averages, needed)).remove


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    compiled = isinstance(module, OptimizedModule) or module._compiled_call_impl is not None
    if compiled or any(True for _ in module.parameters(recurse=False)):
        yield module
        return
    for child in module.children():
        yield from _layers(child)


def _waiter(module: nn.Module, averages: OverlappedAverages, names: set[str] | None) -> Any:
    owner = weakref.ref(module)

    def wait(module: nn.Module, *args: Any) -> None:
        if module is owner():  # and not a copy of it, which takes its hooks along
            averages.wait(names)

    return torch.compiler.disable(wait)  # type: ignore[no-untyped-call]
