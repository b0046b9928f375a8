"""Local steps of one model: count them, and synchronise at the end of a round."""

import logging
import time
import weakref
from inspect import currentframe
from numbers import Real
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torchcomp.aggregators import planned_traffic
from torchcomp.checkpoints import checkpoint
from torchcomp.ddp.checks import bucket_caps, check_not_joined, trained_parameters
from torchcomp.engine import host
from torchcomp.engine.profiling import label
from torchcomp.exchange import ProcessGroupExchange
from torchcomp.exchange.traffic import sum_bytes
from torchcomp.local_sgd import averages
from torchcomp.local_sgd.batchnorm import statistics_of, updated_layers
from torchcomp.local_sgd.method import LocalMethod, Optimizers
from torchcomp.local_sgd.overlap import OverlappedAverages
from torchcomp.local_sgd.rounds import Clock, Fragment, fragments_of
from torchcomp.specs.errors import CheckpointError, ScheduleError, SpecError, UnsupportedModelError

_log = logging.getLogger(__package__)

_SAME_LR = "The learning rate must be the same function of the step on all ranks."
_LOST_STEP = (
    "Every rank must call optimizer.step() once for each step. A rank that calls it more or less "
    "often gets different batches from then on. If a GradScaler skips steps, use "
    f"torchcomp.LocalSGD(..., scaler=scaler). {_SAME_LR}"
)


class LocalSteps:
    """Local steps of one model; the hooks of LocalSGD call :meth:`begin` and :meth:`end`.

    Attributes:
        proposing: measures steps for the schedule "auto".
        counters: traffic and steps. Assigned together, because other threads can read them.
        first_in_node: whether this rank stands for its node; always, with one level.
        forward: whether a forward pass in training has begun since the last step. Ranks can run
            different numbers of them per step, but a step without any had no batch.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizers: Optimizers,
        method: LocalMethod,
        exchange: ProcessGroupExchange,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        # Weak references, because the optimizers' hooks own LocalSGD, which owns this object.
        self._model = weakref.ref(model)
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self.method, self.scaler = method, scaler
        self.forward, self.seconds_waited = False, 0.0
        self._missing = 0  # steps without a forward pass before them
        self._stepped: set[int] = set()  # the optimizers that have taken this step, by index
        trained = dict(trained_parameters(model))
        fragments = fragments_of(method, trained, bucket_caps(model))
        self.clock = Clock(method.horizon.total_steps, fragments)
        names = {name for fragment in fragments for name in fragment.names}
        kind = averages.Averages if method.plain else averages.PseudoGradients
        self.averages = (OverlappedAverages if method.overlap else kind)(
            method,
            exchange,
            {name: p for name, p in trained.items() if name in names},
            [group for fragment in fragments for group in fragment.groups],
        )
        self.averager = self.averages.averager
        self.counters = self.averager.stats, 0
        self._expected_weights: int | None = None  # checksum of a loaded checkpoint's parameters
        # Whether the ranks have been compared. Also False at the start of a run: if only some ranks
        # load a checkpoint, the others must take part in the comparison that finds this.
        self._verified = False
        self.first_in_node = not method.two_levels or dist.get_rank(model.process_group) == 0
        self._warned = False  # whether the log says what an evaluation inside a round means
        # On one rank only: with two levels, each rank of a node is in another exchange.
        self._logs = self.first_in_node and exchange.rank == 0
        self.proposing: Any = None
        if method.proposes:
            from torchcomp.advisor.proposal import Proposing

            self.proposing = Proposing(exchange, self._logs)
        if self._logs:
            self._log_method()

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that still exist."""
        return [each for held in self._optimizers if (each := held()) is not None]

    def warn_of_evaluation(self) -> None:
        """Log a warning, once, if the model is evaluated inside a round."""
        next_sync = self.clock.next_sync
        if next_sync is not None and self._logs and not self._warned:
            self._warned = True
            _log.warning(
                "the model is evaluated after step %d, inside a round: until the ranks average "
                "after step %d, every rank has its own model. Evaluate and save where "
                "sync.next_sync is None",
                *(self.clock.step, next_sync),
            )

    def _log_method(self) -> None:
        averager, method = self.averager, self.method
        shapes = [averager.shape_of(group) for group in averager.groups]
        wide, ranks = [shape.wide() for shape in shapes], averager.exchange.world_size
        _log.info(
            "local steps with %s, total_steps=%d, compress=%s, outer=%s: averaging the %d "
            "parameters, groups: %d, sends %s bytes, and a step of plain DDP %s",
            *(method.spec, self.clock.total_steps, method.aggregator, method.outer),
            *(len(averager.parameters), len(shapes)),
            f"{planned_traffic(method.aggregator, wide, ranks).sent:,}",
            f"{planned_traffic(method.aggregator, shapes, ranks).dense:,}",
        )

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
            self._begin_rounds()
        else:
            # build() exchanges messages, so it runs only at the first step and after a checkpoint.
            between, advice = self.averager.exchange, f"{checkpoint.ONE_STEP} {_SAME_LR}"
            between.build("the first local step", {}, self._first_step, advice)
            self.averages.start(self.averager.groups)
            self._expected_weights, self._verified = None, True

    def end(self, index: int) -> None:
        """Count the step that the optimizer of this index took or skipped.

        After the last optimizer's step, synchronise the fragments whose rounds end.
        """
        self._stepped.add(index)
        if len(self._stepped) < len(self._optimizers):
            return
        self._stepped.clear()
        self.clock.step += 1
        self._missing += not self.forward
        self.forward = False
        due = []
        for fragment in self.clock.fragments:
            known, others = self._lrs(fragment)
            fragment.lr_sum += _largest(known, others) if others else max(known, default=0.0)
            if fragment.end == self.clock.step:
                due.append(fragment)
        if not due:
            self.counters = self.counters[0], self.clock.step
            return
        start = time.perf_counter()
        if self.proposing is not None:
            self.proposing.begin()
        try:
            self._synchronise(due)
        finally:
            # Also of a synchronisation that failed: it has sent bytes, and its step counts.
            self.counters = self.averager.stats, self.clock.step
            self.seconds_waited += time.perf_counter() - start
        if self.proposing is not None:
            self.proposing.end()

    def _begin_rounds(self, verifying: bool = False) -> None:
        # Here, not in end(): a scheduler sets the new learning rate after the optimizer's step.
        for fragment in self.clock.fragments:
            if fragment.end == self.clock.step:
                lrs, others = self._lrs(fragment)
                # Reading a learning rate on an accelerator waits for it. Without need, leave it
                # out: a synchronisation compares the sum of the learning rates in any case.
                if verifying or fragment.schedule.reads_lr:
                    lrs += map(float, others)
                fragment.begin_round(self.clock.step, lrs, self.method.horizon)
                if self._logs:
                    fragment.warn_if_long(self.clock.total_steps)

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
        self._begin_rounds(verifying=True)
        shared["round"] = ", ".join(map(str, self.clock.fragments))
        shared["last synchronisation"] = [each.synced for each in self.clock.fragments]
        shared["learning rates at its start"] = [each.lrs for each in self.clock.fragments]
        return None, shared

    def _lrs(self, fragment: Fragment) -> tuple[list[float], list[Tensor]]:
        """The learning rates of the fragment's groups; last, those that only a wait could read."""
        known, others = list[float](), list[Tensor]()
        for index in fragment.owners:
            optimizer = self._optimizers[index]()
            for group in optimizer.param_groups if optimizer is not None else ():
                lr = group.get("lr")
                if isinstance(lr, Tensor) and not host.can_read(lr):
                    others.append(lr)
                elif isinstance(lr, float | Tensor | Real):
                    known.append(float(lr))
        return known, others

    # --- A synchronisation ---

    @label("synchronise")
    def _synchronise(self, due: list[Fragment]) -> None:
        # If this raises, it raises on every rank and no round has ended.
        step, optimizers, policy = self.clock.step, self.optimizers, self.method.moments
        averager, held = self.averager, self.averager.parameters
        exchange, parameters = averager.exchange, {n: held[n] for each in due for n in each.names}
        model = self._model()
        statistics = {} if model is None else statistics_of(updated_layers(model.module))
        lr_sums = [float(each.lr_sum) for each in due]

        # 1. Verify that all ranks are at the same step with the same learning rates. A rank that
        #    was stepped once too often would otherwise average a different round.
        def state_and_shared() -> tuple[dict[str, Tensor], dict[str, Any]]:
            self._check_trained(model)
            mine = dict(statistics)
            if policy == "average":
                mine |= averages.state_to_average(parameters, optimizers)
            return mine, {
                "steps": step,
                "round": ", ".join(map(str, due)),
                "optimizer steps without forward passes in training mode": self._missing,
                "BatchNorm statistics": ", ".join(statistics),
                "learning rates at its start": [each.lrs for each in due],
                "sum of the learning rates of its steps": lr_sums,
            }

        mine = exchange.build("synchronisation", {}, state_and_shared, _LOST_STEP)
        averager.begin()
        # 2. Compute the means of BatchNorm's statistics and the optimizers' state, which can raise.
        #    Nothing is written yet.
        means = {}
        if statistics or policy == "average":
            means = averages.mean_state(exchange, mine, step)
        groups, dense_bytes = [], 0
        for fragment, lr_sum in zip(due, lr_sums, strict=True):
            steps = step - fragment.synced
            groups += [(group, lr_sum / steps) for group in fragment.groups]
            nbytes = sum(held[name].nbytes for name in fragment.names)
            # Plain DDP would have reduced these gradients at each of the round's steps.
            dense_bytes += steps * sum_bytes(nbytes, exchange.world_size)
        # 3. Average the parameters. This raises on every rank, or on none.
        self.averages.synchronise(groups, step, dense_bytes)
        # 4. Now that every rank has succeeded, change the other state and close the rounds.
        if mine:
            torch._foreach_copy_(list(mine.values()), [means[name] for name in mine])
        for optimizer in optimizers if policy == "reset" else ():
            for parameter in parameters.values():
                optimizer.state.pop(parameter, None)
        for fragment in due:
            fragment.synced, fragment.lr_sum = step, 0.0
        if step >= self.clock.total_steps:
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

    def resumed(self, weights: int) -> None:
        """Note that a state was loaded, and the checksum of the parameters that belong to it."""
        # Checked at the next step: users load the weights before or after this state.
        self._expected_weights, self._verified = weights, False
        self.counters = self.averager.stats, self.clock.step


def _largest(known: list[float], others: list[Tensor]) -> Tensor:
    # In float64, in which the host adds learning rates up as well.
    values = torch.stack([lr.detach().double().reshape(()) for lr in others])
    return values.amax().clamp(min=max(known, default=0.0))


def callers(code: CodeType) -> list[Any]:
    """Return the `self` of each running call of the method with this code, innermost first."""
    # No caller may keep a frame: it would keep all tensors of the script's functions alive.
    frame, found = currentframe(), []
    while frame is not None:
        if frame.f_code is code:
            found.append(frame.f_locals.get("self"))
        frame = frame.f_back
    return found
