"""LocalSGD: local optimizer steps, and an average of the parameters when the schedule says so."""

import logging
import math
import weakref
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchcomp import checkpoint
from torchcomp.bucket import Bucket, Group, memory_order, partition
from torchcomp.component import Component
from torchcomp.ddp.checks import OWNER, bucket_caps, check_is_ddp, check_model, trained_parameters
from torchcomp.errors import CheckpointError, ScheduleError, SpecError, UnsupportedModelError
from torchcomp.exchange import Exchange
from torchcomp.nonfinite import FiniteWatch
from torchcomp.schedules import Horizon, Schedule
from torchcomp.spec import parse_schedule
from torchcomp.stats import Meter, Stats

_log = logging.getLogger(__name__)

_SCALER_ADVICE = (
    "If a GradScaler skips optimizer steps on some ranks, hand it over: "
    "torchcomp.LocalSGD(..., scaler=scaler)."
)


@dataclass
class Progress:
    """One rank's clock.

    Attributes:
        step: turns of the optimizer so far.
        round_start: steps before the round in progress, or before the last one.
        round_end: the step, counted from 1, at whose end that round synchronises.
        syncs: synchronisations so far.
        forwards: forward passes in training since the last synchronisation.
    """

    step: int = 0
    round_start: int = 0
    round_end: int = 0
    syncs: int = 0
    forwards: int = 0

    @property
    def inside_round(self) -> bool:
        """Whether local steps were taken since the last synchronisation."""
        return self.round_start < self.step < self.round_end


class LocalSGD:
    """Train with local steps; average the parameters whenever the schedule ends a round.

    Algorithm 2 ("Local OPT") of Gu et al., ICLR 2024, with the schedule's rule for H. Each rank
    steps its own optimizer on its own gradients; gradients are not exchanged. Momentum and Adam
    moments stay local, neither averaged nor reset. BatchNorm buffers stay local too: DDP's
    broadcast of rank 0's buffers is switched off until :meth:`close`.

    1. At the first step of a round, read the learning rate and fix the round's length H.
    2. Take H local steps.
    3. Average the parameters over the ranks, in float32 or wider. Repeat; the last round is cut so
       that the run ends with an average at exactly ``total_steps``.

    The training loop stays as it is: hooks on the model and the optimizer do the work. The clock
    counts *turns* of the optimizer, ``optimizer.step()`` or ``scaler.step(optimizer)``, skipped or
    not, because a GradScaler skips on one rank and not on another. The average happens inside the
    turn, so whatever follows sees averaged weights.

    Args:
        model: a DDP model; not one that :func:`torchcomp.register` serves.
        optimizer: any torch optimizer over the model's parameters. Where its groups have different
            learning rates, the schedule reads the largest.
        spec: the schedule, such as ``"every(8)"`` or ``"qsr(alpha=0.0175, h_base=4)"``.
        total_steps: T, optimizer steps of the whole run; of what is left of it, if a run goes on
            without :meth:`load_state_dict`.
        warmup_steps: W, steps of learning-rate warm-up.
        scaler: the ``GradScaler`` of the loop, if there is one. One that is not handed over is
            found at the synchronisation after it skipped a step on some rank; after a skip in the
            last round there is none, and the other ranks wait until the group's timeout.

    Raises:
        SpecError: if the schedule or its horizon cannot be built; all ranks raise.
        UnsupportedModelError: as for :func:`torchcomp.register`.
        RankMismatchError: if the ranks give different arguments, at construction; or if they lose
            step with each other, at the next synchronisation.
        ScheduleError: from ``optimizer.step()``, beyond ``total_steps`` or at a rate that the
            schedule cannot use.
        NonFiniteError: at a synchronisation, if a rank's parameters are not finite; no parameter
            has been averaged then.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        spec: str | Component,
        *,
        total_steps: int,
        warmup_steps: int = 0,
        scaler: "torch.amp.GradScaler | None" = None,
    ) -> None:
        check_is_ddp(model)
        device = next(model.module.parameters()).device
        self._exchange = Exchange(model.process_group, device)
        given = {"spec": spec, "total_steps": total_steps, "warmup_steps": warmup_steps}
        self._schedule, self._horizon = self._exchange.agree(
            "torchcomp.LocalSGD",
            given,
            lambda: _check(model, optimizer, spec, Horizon(total_steps, warmup_steps)),
        )
        # The optimizer's hooks own this object. It holds model and optimizer weakly: a cycle would
        # keep the process group, and gloo's threads, alive until after the interpreter has ended.
        self._model = weakref.ref(model)
        self._optimizer = weakref.ref(optimizer)
        self._parameters = dict(trained_parameters(model))
        self._groups = partition(self._parameters.items(), bucket_caps(model))
        self._meter = Meter()
        self._progress = Progress()
        self._rate = math.nan
        self._in_scaler = False
        self._closed = False
        self._expected_weights: int | None = None
        # Whether a rank alone has loaded a checkpoint shows only when all ranks look.
        self._verified = False
        self._undo = self._install(model, optimizer, scaler)
        # A script that ends inside a round has as many models as ranks, and may not know it.
        self._finalizer = weakref.finalize(self, _end, self._progress, self._horizon)

    def __repr__(self) -> str:
        return f"<LocalSGD '{self._schedule}': {self.stats}>"

    @property
    def schedule(self) -> Schedule:
        """The schedule in use; its ``str`` is the spec."""
        return self._schedule

    @property
    def next_sync(self) -> int | None:
        """The step, counted from 1, at which the round in progress ends; None between rounds.

        Between rounds all ranks hold the same parameters: the time to evaluate or to save.
        """
        return self._progress.round_end if self._progress.inside_round else None

    @property
    def stats(self) -> Stats:
        """Counters of this rank: bytes of the last synchronisation and in all."""
        return self._meter.snapshot(self._progress.step, self._progress.syncs, {}, {})

    def state_dict(self) -> dict[str, Any]:
        """This rank's clock: plain numbers and strings.

        It does not hold the weights. In the middle of a round they differ between ranks, as does
        the optimizer's state, so every rank saves its own model, optimizer and this.
        """
        return {
            **checkpoint.header(str(self._schedule), self._exchange),
            "total_steps": self._horizon.total_steps,
            "warmup_steps": self._horizon.warmup_steps,
            **asdict(self._progress),
            "traffic": self._meter.state_dict(),
            "weights": _digest(self._parameters),
            "shapes": checkpoint.shapes(self._parameters),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` of this rank returned; nothing changes on error.

        Load the rank's own weights after ``DistributedDataParallel(...)``, whose constructor copies
        rank 0's to all ranks; the next optimizer step checks that they are those of the checkpoint.

        Raises:
            CheckpointError: if it is another model's, schedule's, run's or rank's.
        """
        checkpoint.check_header(state, str(self._schedule), self._exchange, _STATE_KEYS, _ADVICE)
        checkpoint.check_shapes(state["shapes"], self._parameters)
        for name in ("total_steps", "warmup_steps"):
            if state[name] != getattr(self._horizon, name):
                raise CheckpointError(
                    f"the checkpoint was taken with {name}={state[name]}, and this run has "
                    f"{name}={getattr(self._horizon, name)}"
                )
        for field in fields(Progress):
            setattr(self._progress, field.name, state[field.name])
        self._meter.load_state_dict(state["traffic"])
        self._expected_weights = state["weights"]
        self._verified = False

    def close(self) -> None:
        """Remove every hook and give the model back to DDP; harmless when repeated."""
        self._finalizer()
        self._closed = True
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> "LocalSGD":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _install(
        self,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        scaler: "torch.amp.GradScaler | None",
    ) -> list[Callable[[], None]]:
        undo = [
            _override(model, OWNER, f"torchcomp.LocalSGD('{self._schedule}')"),
            _override(model, "require_backward_grad_sync", False),
            _override(model, "require_forward_param_sync", False),
            _override(model, "broadcast_buffers", False),
            model.register_forward_pre_hook(_counter(model, self._progress)).remove,
            optimizer.register_step_pre_hook(self._before_step).remove,
            optimizer.register_step_post_hook(self._after_step).remove,
        ]
        if scaler is not None:
            undo.append(self._wrap(scaler))
        return undo

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._in_scaler:
            self._begin_turn(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._in_scaler:
            self._end_turn()

    def _wrap(self, scaler: torch.amp.GradScaler) -> Callable[[], None]:
        """Make a call of ``scaler.step`` one turn, skipped or not; returns what undoes it."""
        step, owner = scaler.step, weakref.ref(self)

        def turn(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            sync = owner()
            if sync is None or sync._closed or optimizer is not sync._optimizer():
                return step(optimizer, *args, **kwargs)
            sync._begin_turn(optimizer)
            sync._in_scaler = True
            try:
                result = step(optimizer, *args, **kwargs)
            finally:
                sync._in_scaler = False
            sync._end_turn()
            return result

        undo, mine = _override(scaler, "step", turn), weakref.ref(turn)
        held = weakref.ref(scaler)
        # Another LocalSGD may have wrapped the scaler since, around this one.
        return lambda: undo() if getattr(held(), "step", None) is mine() else None

    def _begin_turn(self, optimizer: torch.optim.Optimizer) -> None:
        model = self._model()
        if model is not None and model._join_config.enable:
            raise UnsupportedModelError(
                "model.join() lets ranks take different numbers of steps, and rounds need the same "
                "number: give every rank the same number of batches"
            )
        progress = self._progress
        if progress.step >= self._horizon.total_steps:
            raise ScheduleError(
                f"optimizer step {progress.step + 1}, but the run was announced with total_steps="
                f"{self._horizon.total_steps}, and its last synchronisation has been: announce "
                "more steps, or close() and go on with plain DDP"
            )
        if not self._verified:
            self._verify()
        if progress.step == progress.round_end:
            rate = max(float(group["lr"]) for group in optimizer.param_groups)
            progress.round_end = self._schedule.round_end(progress.step, rate, self._horizon)
            progress.round_start = progress.step
            self._rate = rate
            self._warn_of_long_round(rate)

    def _warn_of_long_round(self, rate: float) -> None:
        start, end = self._progress.round_start, self._progress.round_end
        total = self._horizon.total_steps
        if self._schedule.reads_rate and 2 * (end - start) > total:
            _log.warning(
                "the round from step %d to %d is most of the run (%d steps), because the learning "
                "rate is %g: no rank averages before its end. If that is a warm-up rate, give "
                "warmup_steps; else compare the schedule's coefficient with the peak rate",
                start,
                end,
                total,
                rate,
            )

    def _end_turn(self) -> None:
        self._progress.step += 1
        if self._progress.step == self._progress.round_end:
            self._synchronise()

    def _verify(self) -> None:
        self._exchange.agree("the first local step", {}, self._check_weights, checkpoint.ONE_STEP)
        self._expected_weights = None
        self._verified = True

    def _check_weights(self) -> tuple[None, dict[str, Any]]:
        expected = self._expected_weights
        if expected is not None and _digest(self._parameters) != expected:
            raise CheckpointError(
                "parameters that are not those of the checkpoint: every rank loads its own weights "
                "after DistributedDataParallel(...), whose constructor copies rank 0's to all ranks"
            )
        return None, {"step": self._progress.step, "round end": self._progress.round_end}

    def _synchronise(self) -> None:
        progress = self._progress
        facts = {
            "optimizer steps": progress.step,
            "round": f"{progress.round_start} to {progress.round_end}",
            "forward passes in training": progress.forwards,
        }
        advice = f"{_SCALER_ADVICE} This rank's round began at the learning rate {self._rate:g}."
        self._exchange.require_same("synchronisation", facts, advice)
        self._average()
        nbytes = sum(parameter.nbytes for parameter in self._parameters.values())
        steps = progress.step - progress.round_start
        self._meter.record(self._exchange.take_traffic(nbytes, steps))
        progress.syncs += 1
        progress.forwards = 0

    @torch.no_grad()
    def _average(self) -> None:
        watch = FiniteWatch(self._exchange)
        buckets = [self._flatten(group) for group in self._groups]
        for bucket in buckets:
            watch.before(bucket)
            self._exchange.sum(bucket.flat)
            # Not times the reciprocal, as gradients are: its rounding errs to one side, and weights
            # that are averaged thousands of times would grow by it.
            bucket.flat.div_(self._exchange.world_size)
            watch.after(bucket)
        where = f"the parameters after step {self._progress.step}"
        if not watch.conclude(where, _NOT_AVERAGED):
            self._exchange.take_traffic(0)
            raise watch.error(where, _NOT_AVERAGED)
        for bucket in buckets:
            self._write_back(bucket)

    def _flatten(self, group: Group) -> Bucket:
        parameters = [self._parameters[name] for name in group]
        sizes = tuple(parameter.numel() for parameter in parameters)
        dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        flat = torch.empty(sum(sizes), dtype=dtype, device=parameters[0].device)
        bucket = Bucket(group, sizes, flat)
        for parameter, part in zip(parameters, bucket.parts().values(), strict=True):
            memory_order(parameter, part).copy_(parameter)
        return bucket

    def _write_back(self, bucket: Bucket) -> None:
        for name, part in bucket.parts().items():
            parameter = self._parameters[name]
            parameter.copy_(memory_order(parameter, part))


_NOT_AVERAGED = "No rank has averaged its parameters."
_ADVICE = {
    "spec": "go on with the schedule that the run began with",
    "world_size": "between rounds all ranks hold the same weights, so save there, and begin anew "
    "with LocalSGD(..., total_steps=what is left)",
}
_STATE_KEYS = (
    "total_steps",
    "warmup_steps",
    *(field.name for field in fields(Progress)),
    "traffic",
    "weights",
    "shapes",
)


def _end(progress: Progress, horizon: Horizon) -> None:
    if progress.inside_round:
        _log.warning(
            "local steps ended at step %d of %d, inside the round from %d to %d: the ranks' "
            "parameters differ, and what one rank evaluates or saves is its own model only",
            progress.step,
            horizon.total_steps,
            progress.round_start,
            progress.round_end,
        )


def _check(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    spec: str | Component,
    horizon: Horizon,
) -> tuple[tuple[Schedule, Horizon], dict[str, Any]]:
    """What this rank's arguments come to, and the facts that all ranks must share."""
    check_model(model)
    if model.static_graph:
        raise UnsupportedModelError(
            "static_graph=True makes DDP expect an exchange in its first backward pass, and local "
            "steps exchange no gradients: build DistributedDataParallel without it"
        )
    _check_optimizer(optimizer, model)
    schedule = parse_schedule(spec)
    schedule.check(horizon)
    parameters = [(name, tuple(p.shape), p.dtype) for name, p in trained_parameters(model)]
    return (schedule, horizon), {"spec": schedule, "parameters": parameters}


def _counter(model: nn.Module, progress: Progress) -> Callable[[nn.Module, Any], None]:
    # A function and not a method: a copy of the model (an average of weights, say) takes its hooks
    # along, and must neither copy the process group nor count.
    owner = weakref.ref(model)

    def count(module: nn.Module, args: Any) -> None:
        if module is owner() and module.training and torch.is_grad_enabled():
            progress.forwards += 1

    return count


def _check_optimizer(optimizer: object, model: DistributedDataParallel) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SpecError(f"expected a torch.optim.Optimizer, not {type(optimizer).__name__}")
    ours = {id(parameter) for parameter in model.parameters()}
    if not any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
        raise SpecError(
            "the optimizer holds no parameter of this model: build it from model.parameters()"
        )


def _override(owner: object, name: str, value: Any) -> Callable[[], None]:
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


def _digest(parameters: dict[str, nn.Parameter]) -> int:
    """A checksum of all weights, to recognise them after a restart."""
    checksum = 0
    for parameter in parameters.values():
        checksum = zlib.crc32(_raw(parameter), checksum)
    return checksum


def _raw(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes()
