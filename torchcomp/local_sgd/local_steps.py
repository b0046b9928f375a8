"""Local steps of one model: count them by hooks, and synchronise at the end of a round."""

import logging
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from inspect import currentframe
from numbers import Real
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torchcomp.checkpoints import checkpoint
from torchcomp.ddp.checks import OWNER, check_not_joined, trained_parameters
from torchcomp.engine import host
from torchcomp.engine.nonfinite import all_finite, largest_magnitudes
from torchcomp.engine.profiling import span
from torchcomp.exchange import ProcessGroupExchange
from torchcomp.exchange.traffic import sum_bytes
from torchcomp.local_sgd import averages, moments
from torchcomp.local_sgd.averages import exact_mean
from torchcomp.local_sgd.batchnorm import statistics_of, updated_layers
from torchcomp.local_sgd.method import LocalMethod, Optimizers
from torchcomp.local_sgd.rounds import Clock, restore
from torchcomp.specs.errors import CheckpointError, ScheduleError, SpecError, UnsupportedModelError

_log = logging.getLogger(__package__)

_SAME_LR = "The learning rate must be the same function of the step on all ranks."
_LOST_STEP = (
    "Every rank must call optimizer.step() once for each step. If a GradScaler skips steps, use "
    f"torchcomp.LocalSGD(..., scaler=scaler). {_SAME_LR}"
)

# What torch puts around the step of every class of optimizers; it runs the hooks.
_STEP: CodeType = torch.optim.Optimizer.profile_hook_step(print).__code__
# With these attributes, DDP would make every rank wait for all others at every step.
_QUIET = ("require_backward_grad_sync", "require_forward_param_sync", "broadcast_buffers")


class LocalSteps:
    """Local steps of one model, owned by the optimizers' hooks, until :meth:`remove`."""

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizers: Optimizers,
        method: LocalMethod,
        exchange: ProcessGroupExchange,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        # Weakly: a cycle would keep gloo's threads alive after the interpreter ends.
        self._model = weakref.ref(model)
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self.method, self.scaler = method, scaler
        self.seconds_waited = 0.0
        self._counts = False  # whether the hooks count the current step
        self._stepped: set[int] = set()  # the optimizers that have taken this step, by index
        self.clock = Clock(method.horizon.total_steps)
        kind: type[averages.Averages] = averages.PseudoGradients
        if method.plain:
            kind = averages.OverlappedAverages if method.overlap else averages.Averages
        self.averages = kind(method, exchange, model)
        self.averager = self.averages.averager
        # Traffic and steps: assigned together, because other threads can read them.
        self.counters = self.averager.stats, 0
        self._expected_weights: int | None = None  # checksum of a loaded checkpoint's parameters
        # Whether the ranks have been compared; if only some load a checkpoint, that finds it.
        self._verified = False
        self.first_in_node = not method.two_levels or dist.get_rank(model.process_group) == 0
        self._logs = self.first_in_node and exchange.rank == 0
        self.proposing: Any = None  # measures steps for the schedule "auto"
        if method.proposes:
            from torchcomp.advisor.proposal import Proposing

            self.proposing = Proposing(exchange, self._logs)
        self._undo = ExitStack()  # in reverse: layers stop to wait before the executor ends
        self._install(model)
        # For a script that ends, or drops its optimizers, inside a round without close().
        self.finalizer = weakref.finalize(self, self.clock.warn_inside_round)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [each for held in self._optimizers if (each := held()) is not None]

    @property
    def counted(self) -> int:
        return self.clock.step * len(self._optimizers) + len(self._stepped)

    def _install(self, model: DistributedDataParallel) -> None:
        undo = self._undo.callback
        # With two levels, DDP continues to reduce gradients and broadcast buffers inside the node.
        undo(_set_apart(model, str(self.method.schedule), quiet=not self.method.two_levels))
        for index, optimizer in enumerate(self.optimizers):
            # Not traced, because the step of an optimizer can be compiled.
            before, after = (
                torch.compiler.disable(partial(hook, index))  # type: ignore[no-untyped-call]
                for hook in (self._before_step, self._after_step)
            )
            undo(optimizer.register_step_pre_hook(before).remove)
            undo(optimizer.register_step_post_hook(after).remove)
        if isinstance(self.averages, averages.OverlappedAverages):
            undo(self.averages.close)
            for handle in averages.wait_in_forward(model.module, self.averages):
                undo(handle.remove)
        if self.scaler is not None:
            undo(_count_scaled(self.scaler, self))

    def remove(self) -> None:
        self.finalizer()  # runs once
        self._undo.close()

    def _before_step(
        self, index: int, optimizer: torch.optim.Optimizer, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        self._counts = not (kwargs and _creates_state(optimizer, kwargs))
        if self._counts:
            self.begin(index)

    def _after_step(
        self, index: int, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> None:
        # A subclass can call super().step(), for which torch runs the hooks again. It is one step,
        # and ends with the outermost call.
        if self._counts and _callers(_STEP).count(optimizer) <= 1:
            self._counts = False
            self.end(index)

    def begin(self, index: int) -> None:
        if index in self._stepped:
            raise ScheduleError(f"optimizer {index} was stepped twice before the others once")
        if self._stepped:  # the first optimizer of the step has prepared it for all
            return
        if self.method.overlap:  # layers that the forward pass did not use have not waited
            self.averages.wait()
        model, clock = self._model(), self.clock
        if model is not None and model._join_config.enable:
            check_not_joined(model)
        if clock.step == clock.total_steps and self._logs:
            _log.warning(
                "beyond total_steps=%d, from step %d on, the ranks average after every step",
                *(clock.total_steps, clock.step + 1),
            )
        if not self._verified:
            between, advice = self.averager.exchange, f"{checkpoint.ONE_STEP} {_SAME_LR}"
            between.build("the first local step", {}, self._first_step, advice)
            self.averages.start()
            self._expected_weights, self._verified = None, True
        else:
            self._begin_round()

    def end(self, index: int) -> None:
        """Count the step that the optimizer of this index took or skipped, and synchronise."""
        self._stepped.add(index)
        if len(self._stepped) < len(self._optimizers):
            return
        self._stepped.clear()
        self.clock.step += 1
        known, others = self._lrs()
        largest: float | Tensor = max(known, default=0.0)
        if others:
            values = torch.stack([lr.detach().double().reshape(()) for lr in others])
            largest = values.amax().clamp(min=largest)
        self.clock.lr_sum += largest
        if self.clock.step < self.clock.end:
            self.counters = self.counters[0], self.clock.step
            return
        start = time.perf_counter()
        if self.proposing is not None:
            self.proposing.begin()
        try:
            self._synchronise()
        finally:
            # Also if it failed: it has sent bytes.
            self.counters = self.averager.stats, self.clock.step
            self.seconds_waited += time.perf_counter() - start
        if self.proposing is not None:
            self.proposing.end()

    def _begin_round(self, verifying: bool = False) -> None:
        # Not in end(): a scheduler sets the new learning rate after the optimizer's step.
        if self.clock.step < self.clock.end:
            return
        lrs, others = self._lrs()
        # Reading one on an accelerator waits for it. A synchronisation compares their sum.
        if verifying or self.method.schedule.reads_lr:
            lrs += map(float, others)
        self.clock.begin_round(lrs, self.method)

    def _first_step(self) -> tuple[None, dict[str, Any]]:
        for found in _callers(torch.amp.GradScaler.step.__code__):
            if found is not self.scaler and found.is_enabled():
                raise SpecError(
                    "a GradScaler, which can skip steps on some ranks only, takes this step: use "
                    "torchcomp.LocalSGD(..., scaler=scaler)",
                    "scaler",
                )
        # The plain average makes any parameters equal. Pseudo-gradients and nodes need equal ones.
        must_be_equal = self.method.two_levels or not self.method.plain
        compared = must_be_equal or self._expected_weights is not None
        digest = checkpoint.digest_of(self.averager.parameters) if compared else None
        if self._expected_weights not in (None, digest):
            raise CheckpointError(
                "the parameters are not those of the checkpoint: load each rank's own weights "
                "after DistributedDataParallel(...), which copies rank 0's to all ranks"
            )
        shared: dict[str, Any] = {"step": self.clock.step}
        if must_be_equal and self.clock.next_sync is None:  # inside a round, they differ
            shared["checksum of the parameters"] = digest
        self._begin_round(verifying=True)
        shared |= {"round": str(self.clock), "last synchronisation": self.clock.synced}
        return None, shared | {"learning rates at its start": self.clock.lrs}

    def _lrs(self) -> tuple[list[float], list[Tensor]]:
        """The learning rates of all groups; last, those that only a wait could read."""
        known, others = list[float](), list[Tensor]()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                lr = group.get("lr")
                if isinstance(lr, Tensor) and not host.can_read(lr):
                    others.append(lr)
                elif isinstance(lr, float | Tensor | Real):
                    known.append(float(lr))
        return known, others

    @span("synchronise")
    def _synchronise(self) -> None:
        """Average over the ranks; if this raises, on all of them, and the round has not ended."""
        exchange, clock, policy = self.averager.exchange, self.clock, self.method.moments
        parameters = self.averager.parameters
        model, step = self._model(), clock.step
        statistics = {} if model is None else statistics_of(updated_layers(model.module))
        lr_sum, steps = float(clock.lr_sum), step - clock.synced

        def shared() -> tuple[dict[str, Tensor], dict[str, Any]]:
            self._check_trained(model)
            averaged = policy == "average"
            own = moments.state_to_average(parameters, self.optimizers) if averaged else {}
            return own, {
                "steps": step,
                "round": str(clock),
                "BatchNorm statistics": ", ".join(statistics),
                "learning rates at its start": clock.lrs,
                "sum of the learning rates of its steps": lr_sum,
            }

        mine = statistics | exchange.build("synchronisation", {}, shared, _LOST_STEP)
        self.averager.begin()
        # These first, because this can raise. Nothing is written yet.
        everyones = moments.with_missing(exchange, mine) if policy == "average" else mine
        means = exact_mean(exchange, dict(sorted(everyones.items())))
        if means:
            where = f"the averages of optimizer state or BatchNorm statistics after step {step}"
            finite = all_finite(means.values(), exchange.device)
            averages.require_finite(exchange, finite, where, everyones)
        # Plain DDP would have reduced these gradients at each of the round's steps.
        nbytes = sum(parameter.nbytes for parameter in parameters.values())
        dense_bytes = steps * sum_bytes(nbytes, exchange.world_size)
        self.averages.synchronise(lr_sum / steps, step, dense_bytes)
        if mine:
            torch._foreach_copy_(list(mine.values()), [means[name] for name in mine])
        for optimizer in self.optimizers if policy == "reset" else ():
            for parameter in parameters.values():
                optimizer.state.pop(parameter, None)
        clock.synced, clock.lr_sum = step, 0.0
        if step >= clock.total_steps:
            self.averages.wait()  # the run can end here, without a step that waits

    def _check_trained(self, model: DistributedDataParallel | None) -> None:
        groups = [group for each in self.optimizers for group in each.param_groups]
        held = {id(p) for group in groups for p in group["params"]}
        for name, parameter in trained_parameters(model) if model is not None else ():
            if name not in self.averager.parameters and id(parameter) in held:
                raise UnsupportedModelError(
                    f"parameter '{name}' is trained, but was not when LocalSGD was built: call "
                    "sync.close() between rounds, and build LocalSGD (with process_group=, also "
                    "DistributedDataParallel) again"
                )

    def require_whole_step(self, call: str) -> None:
        if self._stepped:
            raise RuntimeError(
                f"{call}: only optimizers {sorted(self._stepped)} of {len(self._optimizers)} have "
                "been stepped: call it when each has been"
            )
        self.averages.wait()  # the checksum must be that of the averaged parameters

    def load(self, state: Any) -> None:
        self.require_whole_step("load_state_dict")
        # Compared at the next step: users load the weights before or after this state.
        self._expected_weights = restore(state, self.method, self.clock, self.averager)
        self._verified = False
        self.counters = self.averager.stats, self.clock.step


def _count_scaled(scaler: torch.amp.GradScaler, steps: LocalSteps) -> Callable[[], None]:
    """Count every ``scaler.step(optimizer)``, skipped or not; return what undoes it."""
    # The scaler often outlives local steps, and must not keep them alive.
    owner, own = weakref.ref(steps), vars(scaler).get("step")
    step = scaler.step

    def counted(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        steps = owner()
        if steps is None or not steps.finalizer.alive or optimizer not in steps.optimizers:
            return step(optimizer, *args, **kwargs)
        before = steps.counted
        result = step(optimizer, *args, **kwargs)
        if steps.counted == before:  # a skipped step runs none of the optimizer's hooks
            index = steps.optimizers.index(optimizer)
            steps.begin(index)
            steps.end(index)
        return result

    def undo() -> None:
        # Another LocalSGD can have wrapped it since. This wrapper then passes its calls through.
        if vars(scaler).get("step") is counted:
            del scaler.step
            if own is not None:
                scaler.step = own  # type: ignore[method-assign]

    scaler.step = counted  # type: ignore[method-assign]
    return undo


def _creates_state(optimizer: torch.optim.Optimizer, kwargs: Mapping[str, Any]) -> bool:
    """Whether torch.distributed.checkpoint takes this step only to create the optimizer's state."""
    if kwargs.get("closure", ...) is not None or optimizer.state:
        return False
    groups = optimizer.param_groups
    gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    still = all(float(group.get("lr", 0.0)) == 0.0 for group in groups)
    return still and not largest_magnitudes(gradients, torch.device("cpu")).any()


class _IdleReducer:
    """DDP's reducer, except that it never prepares for a backward pass, so it reduces nothing."""

    # Scripts set require_backward_grad_sync, and Accelerate calls the reducer directly.

    def __init__(self, reducer: Any) -> None:
        self.reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reducer, name)

    def prepare_for_backward(self, outputs: Any) -> None: ...


def _set_apart(model: Any, spec: str, *, quiet: bool) -> Callable[[], None]:
    """Name LocalSGD as the owner of `model`, and make DDP `quiet`; return what undoes it."""
    before = {name: getattr(model, name) for name in _QUIET if quiet}
    before |= {OWNER: vars(model)[OWNER]} if OWNER in vars(model) else {}
    for name in _QUIET if quiet else ():
        setattr(model, name, False)
    if quiet:
        model.reducer = _IdleReducer(model.reducer)
    setattr(model, OWNER, f"torchcomp.LocalSGD('{spec}')")
    model_ref = weakref.ref(model)

    def undo() -> None:  # must not refer to the reducer, which keeps the parameters alive
        model = model_ref()
        if model is not None:
            delattr(model, OWNER)
            for name, value in before.items():
                setattr(model, name, value)
            if quiet:
                model.reducer = model.reducer.reducer

    return undo


def _callers(code: CodeType) -> list[Any]:
    """Return the `self` of each running call of the method with this code, innermost first."""
    # No caller may keep a frame: it would keep all tensors of the script's functions alive.
    frame, found = currentframe(), []
    while frame is not None:
        if frame.f_code is code:
            found.append(frame.f_locals.get("self"))
        frame = frame.f_back
    return found
