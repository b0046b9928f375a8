"""Local steps of one model: count them by hooks, and synchronise at the end of a round."""

import logging
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchcomp.checkpoints import checkpoint
from torchcomp.ddp.checks import bucket_caps, check_not_joined, trained_parameters
from torchcomp.engine import host
from torchcomp.engine.bucket import partition
from torchcomp.engine.profiling import label
from torchcomp.exchange import ProcessGroupExchange
from torchcomp.exchange.traffic import sum_bytes
from torchcomp.local_sgd import averages
from torchcomp.local_sgd.batchnorm import statistics_of, updated_layers
from torchcomp.local_sgd.hooks import STEP, callers, creates_state, set_apart
from torchcomp.local_sgd.method import LocalMethod, Optimizers
from torchcomp.local_sgd.rounds import Clock, restore
from torchcomp.specs.errors import CheckpointError, ScheduleError, SpecError, UnsupportedModelError

_log = logging.getLogger(__package__)

_SAME_LR = "The learning rate must be the same function of the step on all ranks."
_LOST_STEP = (
    "Every rank must call optimizer.step() once for each step. A rank that calls it more or less "
    "often gets different batches from then on. If a GradScaler skips steps, use "
    f"torchcomp.LocalSGD(..., scaler=scaler). {_SAME_LR}"
)


class LocalSteps:
    """Local steps of one model, from the constructor until :meth:`remove`.

    The optimizers' hooks own it: local steps go on if the user keeps no reference. It refers to
    model and optimizers weakly: a cycle would keep gloo's threads alive after the interpreter ends.

    Attributes:
        proposing: measures steps for the schedule "auto".
        counters: traffic and steps. Assigned together, because other threads can read them.
        first_in_node: whether this rank stands for its node; always, with one level.
        scaling: whether the scaler's ``step`` is running.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizers: Optimizers,
        method: LocalMethod,
        exchange: ProcessGroupExchange,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self._model = weakref.ref(model)
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self.method, self.scaler = method, scaler
        self.scaling, self.seconds_waited = False, 0.0
        self._counts = False  # whether the hooks count the current step
        # Whether a forward pass in training has begun since the last step. Ranks can run different
        # numbers of them per step, but a step without any had no batch.
        self._forward = False
        self._missing = 0  # steps without a forward pass before them
        self._stepped: set[int] = set()  # the optimizers that have taken this step, by index
        trained = dict(trained_parameters(model))
        self.clock = Clock(method.horizon.total_steps)
        kind: type[averages.Averages] = averages.PseudoGradients
        if method.plain:
            kind = averages.OverlappedAverages if method.overlap else averages.Averages
        groups = partition(trained.items(), bucket_caps(model))
        self.averages = kind(method, exchange, trained, groups)
        self.averager = self.averages.averager
        self.counters = self.averager.stats, 0
        self._expected_weights: int | None = None  # checksum of a loaded checkpoint's parameters
        # Whether the ranks have been compared. Also False at the start of a run: if only some ranks
        # load a checkpoint, the others must take part in the comparison that finds this.
        self._verified = False
        self.first_in_node = not method.two_levels or dist.get_rank(model.process_group) == 0
        # On one rank only: with two levels, each rank of a node is in another exchange.
        self._logs = self.first_in_node and exchange.rank == 0
        self.proposing: Any = None
        if method.proposes:
            from torchcomp.advisor.proposal import Proposing

            self.proposing = Proposing(exchange, self._logs)
        self._undo = ExitStack()  # in reverse: layers stop to wait before the executor ends
        self._install(model)
        # For a script that ends, or drops its optimizers, inside a round without close().
        self.finalizer = weakref.finalize(self, self.clock.warn_inside_round)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that still exist."""
        return [each for held in self._optimizers if (each := held()) is not None]

    # --- Hooks ---

    def _install(self, model: DistributedDataParallel) -> None:
        undo = self._undo.callback
        # With two levels, DDP continues to reduce gradients and broadcast buffers inside the node.
        undo(set_apart(model, self.method.spec, quiet=not self.method.two_levels))
        undo(model.register_forward_pre_hook(self._before_forward(model)).remove)
        for index, optimizer in enumerate(self.optimizers):
            # Not traced: the step of an optimizer can be compiled.
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
        """Remove every hook and restore plain DDP; log a warning if a round is in progress."""
        # A finalizer runs once, so the warning is not repeated.
        self.finalizer()
        self._undo.close()

    def _before_forward(self, model: DistributedDataParallel) -> Any:
        # copy.deepcopy of the model (for an EMA, say) copies its hooks. Weak references keep it
        # from copying this object with its process group. The copy's forward passes must not count.
        model_ref, steps_ref = weakref.ref(model), weakref.ref(self)

        def hook(module: nn.Module, args: Any) -> None:
            steps = steps_ref()
            # Not for evaluation, which often runs on rank 0 alone.
            if steps is not None and module is model_ref():
                steps._forward |= module.training and torch.is_grad_enabled()

        # Otherwise a compiled model would be compiled again at every step.
        return torch.compiler.disable(hook)  # type: ignore[no-untyped-call]

    def _before_step(
        self, index: int, optimizer: torch.optim.Optimizer, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        # During scaler.step(), _count_scaled() counts: a skipped step calls no optimizer hook.
        self._counts = not (self.scaling or (kwargs and creates_state(optimizer, kwargs)))
        if self._counts:
            self.begin(index)

    def _after_step(
        self, index: int, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> None:
        # A subclass can call super().step(), for which torch runs the hooks again: it is one step.
        # It begins as often as torch says, and ends with the outermost call.
        if self._counts and callers(STEP).count(optimizer) <= 1:
            self._counts = False
            self.end(index)

    # --- A step ---

    def begin(self, index: int) -> None:
        """Prepare for the step that the optimizer of this index is about to take."""
        if index in self._stepped:
            waiting = min(set(range(len(self._optimizers))) - self._stepped)
            raise ScheduleError(
                f"optimizer {index} was stepped twice before optimizer {waiting} was stepped once: "
                "step every optimizer once in each step"
            )
        # The first optimizer of the step has prepared it for all.
        if self._stepped:
            return
        # Layers that the forward pass did not use have not waited for their averages yet.
        if self.method.overlap:
            self.averages.wait()
        model, step, total = self._model(), self.clock.step, self.clock.total_steps
        if model is not None and model._join_config.enable:
            check_not_joined(model)
        if step == total and self._logs:
            _log.warning(
                "optimizer step %d is beyond total_steps=%d: from here on, the ranks average after "
                "every step. Pass a larger total_steps if the run is longer",
                *(step + 1, total),
            )
        if self._verified:
            if self.clock.end == step:
                self._begin_round()
        else:
            # build() exchanges messages, so it runs only at the first step and after a checkpoint.
            between, advice = self.averager.exchange, f"{checkpoint.ONE_STEP} {_SAME_LR}"
            between.build("the first local step", {}, self._first_step, advice)
            self.averages.start()
            self._expected_weights, self._verified = None, True

    def end(self, index: int) -> None:
        """Count the step that the optimizer of this index took or skipped, and synchronise."""
        self._stepped.add(index)
        if len(self._stepped) < len(self._optimizers):
            return
        self._stepped.clear()
        self.clock.step += 1
        self._missing += not self._forward
        self._forward = False
        known, others = self._lrs()
        self.clock.lr_sum += _largest(known, others) if others else max(known, default=0.0)
        if self.clock.step < self.clock.end:
            self.counters = self.counters[0], self.clock.step
            return
        start = time.perf_counter()
        if self.proposing is not None:
            self.proposing.begin()
        try:
            self._synchronise()
        finally:
            # Also of a synchronisation that failed: it has sent bytes, and its step counts.
            self.counters = self.averager.stats, self.clock.step
            self.seconds_waited += time.perf_counter() - start
        if self.proposing is not None:
            self.proposing.end()

    def _begin_round(self, verifying: bool = False) -> None:
        # Not in end(): a scheduler sets the new learning rate after the optimizer's step.
        lrs, others = self._lrs()
        # Reading a learning rate on an accelerator waits for it. Without need, leave it out: a
        # synchronisation compares the sum of the learning rates in any case.
        reads_lr = self.method.schedule.reads_lr
        if verifying or reads_lr:
            lrs += map(float, others)
        self.clock.begin_round(lrs, self.method)
        if self._logs and reads_lr:
            self.clock.warn_if_long()

    def _first_step(self) -> tuple[None, dict[str, Any]]:
        for found in callers(torch.amp.GradScaler.step.__code__):
            if found is not self.scaler and found.is_enabled():
                raise SpecError(
                    "a GradScaler that was not passed to LocalSGD takes this optimizer step. It "
                    "can skip steps on some ranks only: use torchcomp.LocalSGD(..., scaler=scaler)",
                    "scaler",
                )
        # The plain average makes any parameters equal. Pseudo-gradients are applied to x, and ranks
        # of a node reduce gradients: both need equal parameters at the start.
        must_be_equal = self.method.two_levels or not self.method.plain
        digest = None
        if self._expected_weights is not None or must_be_equal:
            digest = checkpoint.digest_of(self.averager.parameters)
        if self._expected_weights not in (None, digest):
            raise CheckpointError(
                "the parameters are not those of the checkpoint: load each rank's own weights "
                "after DistributedDataParallel(...), whose constructor copies rank 0's to all ranks"
            )
        shared: dict[str, Any] = {"step": self.clock.step}
        # Inside a round the parameters differ between ranks by design.
        if must_be_equal and self.clock.next_sync is None:
            shared["checksum of the parameters"] = digest
        if self.clock.end == self.clock.step:
            self._begin_round(verifying=True)
        shared["round"] = str(self.clock)
        shared["last synchronisation"] = self.clock.synced
        shared["learning rates at its start"] = self.clock.lrs
        return None, shared

    def _lrs(self) -> tuple[list[float], list[Tensor]]:
        """The learning rates of all groups; last, those that only a wait could read."""
        known, others = list[float](), list[Tensor]()
        for held in self._optimizers:
            optimizer = held()
            for group in optimizer.param_groups if optimizer is not None else ():
                lr = group.get("lr")
                if isinstance(lr, Tensor) and not host.can_read(lr):
                    others.append(lr)
                elif isinstance(lr, float | Tensor | Real):
                    known.append(float(lr))
        return known, others

    # --- A synchronisation ---

    @label("synchronise")
    def _synchronise(self) -> None:
        # If this raises, it raises on every rank and the round has not ended.
        clock, optimizers, policy = self.clock, self.optimizers, self.method.moments
        exchange, parameters = self.averager.exchange, self.averager.parameters
        model, step = self._model(), clock.step
        statistics = {} if model is None else statistics_of(updated_layers(model.module))
        lr_sum, steps = float(clock.lr_sum), step - clock.synced

        # 1. Verify that all ranks are at the same step with the same learning rates. A rank that
        #    was stepped once too often would otherwise average a different round.
        def state_and_shared() -> tuple[dict[str, Tensor], dict[str, Any]]:
            self._check_trained(model)
            mine = dict(statistics)
            if policy == "average":
                mine |= averages.state_to_average(parameters, optimizers)
            return mine, {
                "steps": step,
                "round": str(clock),
                "optimizer steps without forward passes in training mode": self._missing,
                "BatchNorm statistics": ", ".join(statistics),
                "learning rates at its start": clock.lrs,
                "sum of the learning rates of its steps": lr_sum,
            }

        mine = exchange.build("synchronisation", {}, state_and_shared, _LOST_STEP)
        self.averager.begin()
        # 2. Compute the means of BatchNorm's statistics and the optimizers' state, which can raise.
        #    Nothing is written yet.
        means = {}
        if statistics or policy == "average":
            means = averages.mean_state(exchange, mine, step)
        # 3. Average the parameters. This raises on every rank, or on none. Plain DDP would have
        #    reduced these gradients at each of the round's steps.
        nbytes = sum(parameter.nbytes for parameter in parameters.values())
        dense_bytes = steps * sum_bytes(nbytes, exchange.world_size)
        self.averages.synchronise(lr_sum / steps, step, dense_bytes)
        # 4. Now that every rank has succeeded, change the other state and close the rounds.
        if mine:
            torch._foreach_copy_(list(mine.values()), [means[name] for name in mine])
        for optimizer in optimizers if policy == "reset" else ():
            for parameter in parameters.values():
                optimizer.state.pop(parameter, None)
        clock.synced, clock.lr_sum = step, 0.0
        if step >= clock.total_steps:
            self.averages.wait()  # the run can end here, without a step that waits

    def _check_trained(self, model: DistributedDataParallel | None) -> None:
        """Raise if an optimizer trains a parameter of the model that is not averaged."""
        groups = [group for each in self.optimizers for group in each.param_groups]
        held = {id(p) for group in groups for p in group["params"]}
        for name, parameter in trained_parameters(model) if model is not None else ():
            if name not in self.averager.parameters and id(parameter) in held:
                raise UnsupportedModelError(
                    f"parameter '{name}' is trained, but was frozen, or not in the model or its "
                    "optimizer, when LocalSGD was built, and is not averaged: call sync.close() "
                    "between rounds, and build LocalSGD (with process_group=, also "
                    "DistributedDataParallel) again"
                )

    # --- Checkpoints ---

    def require_whole_step(self, call: str) -> None:
        """Raise RuntimeError if only some optimizers have been stepped; wait for averages."""
        if self._stepped:
            raise RuntimeError(
                f"{call} was called after only optimizers {sorted(self._stepped)} of "
                f"{len(self._optimizers)} were stepped: call it when each has been stepped once"
            )
        # The parameters, and their checksum, must be those after the average.
        self.averages.wait()

    def load(self, state: Any) -> None:
        """Restore a state of these local steps; on error, nothing changes."""
        self.require_whole_step("load_state_dict")
        # Checked at the next step: users load the weights before or after this state.
        self._expected_weights = restore(state, self.method, self.clock, self.averager)
        self._verified = False
        self.counters = self.averager.stats, self.clock.step


def _largest(known: list[float], others: list[Tensor]) -> Tensor:
    # In float64, in which the host adds learning rates up as well.
    values = torch.stack([lr.detach().double().reshape(()) for lr in others])
    return values.amax().clamp(min=max(known, default=0.0))


def _count_scaled(scaler: torch.amp.GradScaler, steps: LocalSteps) -> Callable[[], None]:
    """Count every ``scaler.step(optimizer)``, skipped or not; return what undoes it."""
    # The scaler often outlives local steps, and must not keep them alive.
    owner, before = weakref.ref(steps), vars(scaler).get("step")
    step = scaler.step

    def counted(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        steps = owner()
        if steps is None or not steps.finalizer.alive or optimizer not in steps.optimizers:
            return step(optimizer, *args, **kwargs)
        index = steps.optimizers.index(optimizer)
        # Around the call, because a skipped step runs none of the optimizer's hooks.
        steps.begin(index)
        steps.scaling = True
        try:
            result = step(optimizer, *args, **kwargs)
        finally:
            steps.scaling = False
        steps.end(index)
        return result

    def undo() -> None:
        # Another LocalSGD can have wrapped it since. This wrapper then passes its calls through.
        if vars(scaler).get("step") is counted:
            del scaler.step
            if before is not None:
                scaler.step = before  # type: ignore[method-assign]

    scaler.step = counted  # type: ignore[method-assign]
    return undo
