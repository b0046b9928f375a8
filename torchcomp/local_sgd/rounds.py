"""Rounds: a fragment's round, a step of all optimizers, a synchronisation, and late parameters."""

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torchcomp import checkpoint
from torchcomp.bucket import Caps, Group, merge, partition
from torchcomp.ddp.checks import bucket_caps, check_not_joined, trained_parameters
from torchcomp.errors import CheckpointError, ScheduleError, UnsupportedModelError
from torchcomp.exchange import ProcessGroupExchange
from torchcomp.local_sgd.averages import Averages, OverlappedAverages, PseudoGradients
from torchcomp.local_sgd.optimizer_state import mean_state, state_to_average
from torchcomp.local_sgd.options import (
    LocalMethod,
    Parameters,
    check_no_hook,
    check_no_other_scaler,
    check_values,
)
from torchcomp.schedules import Schedule
from torchcomp.traffic import sum_bytes

_log = logging.getLogger(__package__)

_SAME_LR = "The learning rate is the same function of the step on all ranks."
_LOST_STEP = (
    "Every rank calls optimizer.step() once for each step; one that skips it, or takes it twice, "
    "works on other batches than the others from then on, and runs out of them at another time. If "
    f"a GradScaler skips steps, hand it over: torchcomp.LocalSGD(..., scaler=scaler). {_SAME_LR}"
)
_OTHER_RANKS = {
    "world_size": "torchcomp.redistribute(states, world_size) makes states that were saved between "
    "rounds fit",
}


@dataclass
class Fragment:
    """Parameters that are averaged together, and their round in progress, or the last one."""

    groups: tuple[Group, ...]  # names of what is averaged in one bucket
    schedule: Schedule
    owners: tuple[int, ...]  # indices of the optimizers whose learning rates the schedule reads
    phase: tuple[int, int]  # the part of a round, as a fraction, that the run's first one takes
    start: int = 0  # steps before the round
    end: int = 0  # the step, counted from 1, at whose end it synchronises
    synced: int = 0  # the step at whose end it synchronised last
    lrs: list[float] = field(default_factory=list)  # of each parameter group at its first step
    lr_sum: float = 0.0  # over the steps since the last synchronisation, the largest of each

    def __str__(self) -> str:
        return f"{self.start} to {self.end}"

    @property
    def names(self) -> list[str]:
        """Of all its parameters."""
        return list(chain.from_iterable(self.groups))

    def begin_round(self, step: int, lrs: list[float], method: LocalMethod) -> None:
        """Fix the length of the round that the next step begins, after `step` others.

        The schedule reads the largest of `lrs`, or 0. If it raises, nothing changes.
        """
        lr, total = max(lrs, default=0.0), method.horizon.total_steps
        end = self.schedule.round_end(step, lr, method.horizon)
        if step == 0:
            numerator, denominator = self.phase
            end = -(-end * numerator // denominator)
        self.start, self.end, self.lrs = step, end, lrs
        if self.schedule.reads_lr and 2 * (end - step) > total:
            _log.warning(
                "the round from step %d to %d is most of the run (%d steps), because the learning "
                "rate is %g: no rank averages before its end. If that is a warm-up rate, give "
                "warmup_steps; else compare the schedule's coefficient with the peak rate",
                step,
                end,
                total,
                lr,
            )


@dataclass
class Clock:
    """One rank's steps and rounds.

    Not part of LocalSteps, because the warning of a script that ends keeps it alive till then.
    """

    total_steps: int
    fragments: list[Fragment]
    step: int = 0  # skipped ones included

    @property
    def next_sync(self) -> int | None:
        """The end of the round in progress that ends first; None if there is none."""
        return min((each.end for each in self.fragments if self.step > each.synced), default=None)

    def warn_inside_round(self) -> None:
        """A script that ends inside a round has as many models as ranks, and may not know it."""
        if self.next_sync is not None:
            _log.warning(
                "local steps ended at step %d of %d, inside the round from %s: the ranks' "
                "parameters differ, and what one rank evaluates or saves is its own model only",
                self.step,
                self.total_steps,
                " and ".join(map(str, self.fragments)),
            )


def fragments_of(method: LocalMethod, parameters: Parameters, caps: Caps) -> list[Fragment]:
    """The parameters of every schedule, cut into pieces with rounds out of phase.

    Pieces are of about equal bytes, in registration order. The first round of piece p of P takes
    (p + 1)/P of a round, so they synchronise in turn, as in Streaming DiLoCo (Douillard et al.,
    2025, arXiv 2501.18512), but without its delayed application, which is another algorithm. All
    synchronise at the end.
    """
    pieces, found = method.fragments, []
    for (names, owners), schedule in zip(method.parts, method.schedules, strict=True):
        sizes = [parameters[name].nbytes for name in names]
        middles = [end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True)]
        fair = [int(pieces * middle / max(sum(sizes), 1)) for middle in middles]
        for index, (start, stop) in enumerate(pairwise(piece_bounds(fair, pieces))):
            groups = partition([(name, parameters[name]) for name in names[start:stop]], caps)
            if method.aggregator.whole_model:
                groups = merge(groups, parameters)
            found.append(Fragment(groups, schedule, owners, (index + 1, pieces)))
    return found


def piece_bounds(fair: Sequence[int], pieces: int) -> list[int]:
    """Where pieces begin and end if each parameter goes to its fair piece, and none is empty."""
    bounds = [0]
    for index in range(1, pieces):
        before = sum(piece < index for piece in fair)
        bounds.append(min(max(before, bounds[-1] + 1), len(fair) - pieces + index))
    return [*bounds, len(fair)]


class LocalSteps:
    """Local steps of one model, without the hooks that drive them.

    Model and optimizers are held weakly, because the optimizers' hooks own what owns this.

    Attributes:
        forward: whether a forward pass in training has begun since the last step. Ranks may
            run different numbers of them per step, but a step without any has lost its batch.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizers: Sequence[torch.optim.Optimizer],
        method: LocalMethod,
        exchange: ProcessGroupExchange,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self._model = weakref.ref(model)
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self.method, self.scaler = method, scaler
        self.forward = False
        self._missing = 0  # steps without a forward pass before them
        self._stepped: set[int] = set()
        trained = dict(trained_parameters(model))
        fragments = fragments_of(method, trained, bucket_caps(model))
        self.clock = Clock(method.horizon.total_steps, fragments)
        groups = [group for fragment in fragments for group in fragment.groups]
        names = set(chain.from_iterable(groups))
        parameters = {name: p for name, p in trained.items() if name in names}
        kind = Averages if method.plain else PseudoGradients
        kind = OverlappedAverages if method.overlap else kind
        self.averages = kind(method, exchange, parameters, groups)
        self._averager = self.averages.averager
        self._reads_lr = method.outer is not None and method.outer.reads_lr
        # What DDP reduces, and what is known: averaged already, or not to be, as DDP ignores it.
        self._reduced = set(map(id, trained.values()))
        named = model.module.named_parameters()
        self._known = {id(p) for name, p in named if name in model.parameters_to_ignore}
        self._known |= set(map(id, parameters.values()))
        self._added: list[str] = []
        self._expected_weights: int | None = None
        # Whether a rank alone has loaded a checkpoint shows only when all ranks look.
        self._verified = False

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that are alive."""
        return [each for held in self._optimizers if (each := held()) is not None]

    # A step.

    def begin(self, index: int) -> None:
        """The optimizer of this index is about to step."""
        if index in self._stepped:
            waiting = min(set(range(len(self._optimizers))) - self._stepped)
            raise ScheduleError(
                f"optimizer {index} was stepped twice before optimizer {waiting} was stepped once: "
                "with several optimizers, a step counts when each has been stepped once"
            )
        if self._stepped:
            return
        if self.method.overlap:
            self.averages.wait()
        model, step, total = self._model(), self.clock.step, self.clock.total_steps
        if model is not None and model._join_config.enable:
            check_not_joined(model)
        if step >= total:
            raise ScheduleError(
                f"optimizer step {step + 1}, but the run was announced with total_steps="
                f"{total}, and its last synchronisation has been: announce more steps, or close() "
                "and go on with plain DDP (with moments='average', or a new optimizer: the ranks' "
                "moments differ otherwise, and their parameters drift apart)"
            )
        self._take_in_late()
        if self._verified:
            self._begin_rounds()
        else:
            between, advice = self._averager.exchange, f"{checkpoint.ONE_STEP} {_SAME_LR}"
            between.build("the first local step", {}, self._first_step, advice)
            self.averages.start(self._averager.groups)
            self._expected_weights = None
            self._verified = True

    def end(self, index: int) -> None:
        """It has stepped, or was skipped; after the last one, the ranks may synchronise."""
        self._stepped.add(index)
        if len(self._stepped) < len(self._optimizers):
            return
        self._stepped.clear()
        self.clock.step += 1
        self._missing += not self.forward
        self.forward = False
        due = []
        for fragment in self.clock.fragments:
            # Where nothing reads it, no step waits for a learning rate that a device holds.
            lrs = self._lrs(fragment, wait=self._reads_lr)
            fragment.lr_sum += max(lrs, default=0.0)
            if fragment.end == self.clock.step:
                due.append(fragment)
        if due:
            self._synchronise(due)

    def _begin_rounds(self) -> None:
        for fragment in self.clock.fragments:
            if fragment.end == self.clock.step:
                fragment.begin_round(self.clock.step, self._lrs(fragment), self.method)

    def _first_step(self) -> tuple[None, dict[str, Any]]:
        """Check the step that follows the start or a checkpoint, and what ranks must share."""
        check_no_other_scaler(self.optimizers, self.scaler)
        model, two_levels = self._model(), self.method.two_levels
        if model is not None and not two_levels:
            check_no_hook(model)
        must_be_equal = two_levels or not self.method.plain
        digest = None
        if self._expected_weights is not None or must_be_equal:
            digest = checkpoint.digest_of(self._averager.parameters)
        if self._expected_weights not in (None, digest):
            raise CheckpointError(
                "parameters that are not those of the checkpoint: every rank loads its own weights "
                "after DistributedDataParallel(...), whose constructor copies rank 0's to all ranks"
            )
        facts: dict[str, Any] = {"step": self.clock.step}
        if must_be_equal and self.clock.next_sync is None:
            facts["checksum of the parameters"] = digest
        self._begin_rounds()
        facts["round"] = ", ".join(map(str, self.clock.fragments))
        facts["learning rates at its start"] = [each.lrs for each in self.clock.fragments]
        return None, facts

    def _lrs(self, fragment: Fragment, wait: bool = True) -> list[float]:
        """The learning rates of its parameter groups that have a number as "lr".

        Without `wait` there are none if a device holds one, because to read it would wait for it.
        """
        lrs = []
        for index in fragment.owners:
            optimizer = self._optimizers[index]()
            for group in optimizer.param_groups if optimizer is not None else ():
                lr = group.get("lr")
                if isinstance(lr, Tensor) and not (wait or lr.is_cpu):
                    return []
                if isinstance(lr, float | Tensor | Real):
                    lrs.append(float(lr))
        return lrs

    # A synchronisation.

    def _synchronise(self, due: list[Fragment]) -> None:
        """End the round of every fragment that is due, on all ranks or, with an error, on none."""
        step, optimizers, policy = self.clock.step, self.optimizers, self.method.moments
        averager, held = self._averager, self._averager.parameters
        exchange, parameters = averager.exchange, {n: held[n] for each in due for n in each.names}

        def facts() -> tuple[dict[str, Tensor], dict[str, Any]]:
            mine = state_to_average(parameters, optimizers) if policy == "average" else {}
            return mine, {
                "steps": step,
                "round": ", ".join(map(str, due)),
                "steps without forward passes in training": self._missing,
                "learning rates at its start": [each.lrs for each in due],
                "sum of the learning rates of its steps": [each.lr_sum for each in due],
                "parameters added": ", ".join(self._added) or "none",
            }

        mine = exchange.build("synchronisation", {}, facts, _LOST_STEP)
        averager.begin()
        means = mean_state(exchange, mine, step) if policy == "average" else {}
        groups, dense_bytes = [], 0
        for fragment in due:
            steps = step - fragment.synced
            groups += [(group, fragment.lr_sum / steps) for group in fragment.groups]
            nbytes = sum(held[name].nbytes for name in fragment.names)
            dense_bytes += steps * sum_bytes(nbytes, exchange.world_size)
        self.averages.synchronise(groups, step, dense_bytes)
        for name, tensor in mine.items():
            tensor.copy_(means[name])
        for optimizer in optimizers if policy == "reset" else ():
            for parameter in parameters.values():
                optimizer.state.pop(parameter, None)
        for fragment in due:
            fragment.synced, fragment.lr_sum = step, 0.0
        self._added.clear()
        if step == self.clock.total_steps:
            self.averages.wait()  # nothing follows that the last average could overlap with

    # Parameters that begin to be trained after local steps have begun.

    def _take_in_late(self) -> None:
        """Average what the optimizers have begun to train of the model, before its first change."""
        model = self._model()
        for index, optimizer in enumerate(self.optimizers):
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            late = {id(p) for p in trained if p.requires_grad} - self._known
            if late and model is not None:
                named = model.module.named_parameters()
                new = {n.replace("_orig_mod.", ""): p for n, p in named if id(p) in late}
                if new:
                    self._add(model, index, new)

    def _add(self, model: DistributedDataParallel, index: int, new: Parameters) -> None:
        unknown = [name for name, parameter in new.items() if id(parameter) not in self._reduced]
        if unknown and self.method.two_levels:
            raise UnsupportedModelError(
                f"parameter '{unknown[0]}' was frozen or not in the model when "
                "DistributedDataParallel was built, which does not reduce its gradients inside the "
                "nodes: close(), build DistributedDataParallel anew, and LocalSGD after it"
            )
        check_values(model)
        groups = partition(new.items(), bucket_caps(model))
        home = [fragment for fragment in self.clock.fragments if index in fragment.owners][-1]
        home.groups = (*home.groups, *groups)
        self._known |= set(map(id, new.values()))
        self._averager.add(new, groups)
        self.averages.start(groups)
        digest = 0 if self.method.plain else checkpoint.digest_of(new)
        self._added.append(f"{', '.join(new)} (checksum {digest})")

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`torchcomp.LocalSGD.state_dict`."""
        self._require_whole_step("state_dict")
        between = self._averager.exchange
        return {
            **self._averager.state_dict(),
            "local_sgd": {
                **self._fixed(),
                "step": self.clock.step,
                "syncs": self._averager.step,
                "saved_by": [between.rank, between.world_size],
                "weights": checkpoint.digest_of(self._averager.parameters),
                "fragments": [
                    {"names": each.names, **{key: getattr(each, key) for key in _ROUND}}
                    for each in self.clock.fragments
                ],
            },
        }

    def load_state_dict(self, state: Any) -> None:
        """See :meth:`torchcomp.LocalSGD.load_state_dict`."""
        self._require_whole_step("load_state_dict")
        section: Any = state.get("local_sgd") if isinstance(state, Mapping) else None
        _SECTION(section, "local_sgd")
        self._check(section)
        restore = self._averager.prepare(state, _OTHER_RANKS)
        groups = [tuple(group) for group in state["groups"]]
        fragments = []
        for fragment, saved in zip(self.clock.fragments, section["fragments"], strict=True):
            own = tuple(group for group in groups if group[0] in saved["names"])
            fragments.append(replace(fragment, groups=own, **{key: saved[key] for key in _ROUND}))
        names = [sorted(fragment.names) for fragment in fragments]
        once = sorted(chain.from_iterable(names)) == sorted(self._averager.parameters)
        if not once or names != [sorted(saved["names"]) for saved in section["fragments"]]:
            raise CheckpointError(
                "a damaged checkpoint: local_sgd.fragments must hold every parameter once, and "
                "whole groups"
            )
        restore()
        self.clock.fragments, self.clock.step = fragments, section["step"]
        self._expected_weights, self._verified = section["weights"], False

    def _require_whole_step(self, call: str) -> None:
        if self._stepped:
            raise RuntimeError(
                f"{call} where some optimizers were stepped and others were not: call it when each "
                "has been stepped once"
            )
        self.averages.wait()

    def _fixed(self) -> dict[str, Any]:
        """What must not change from a checkpoint to the run that loads it."""
        return {
            "schedule": self.method.spec,
            "total_steps": self.clock.total_steps,
            "warmup_steps": self.method.horizon.warmup_steps,
            "compress": str(self.method.aggregator),
            "outer": str(self.method.outer),
            "moments": self.method.moments,
        }

    def _check(self, section: dict[str, Any]) -> None:
        """Require a section of this run, of this rank or of all, and with a clock that can be."""
        rounds = section["fragments"]
        here = {**self._fixed(), "fragments": len(self.clock.fragments)}
        there = {**section, "fragments": len(rounds)}
        for name, value in here.items():
            if there[name] != value:
                raise CheckpointError(
                    f"the checkpoint was taken with {name}={there[name]}, and this run has "
                    f"{name}={value}"
                )
        step, total = section["step"], section["total_steps"]
        for each in rounds:
            in_order = each["start"] <= step <= each["end"] <= total and each["synced"] <= step
            if not in_order or each["lr_sum"] < 0 or section["syncs"] > step:
                raise CheckpointError(
                    f"a damaged checkpoint: step {step} of {total}, {section['syncs']} "
                    f"synchronisations, the last one at step {each['synced']}, and the round from "
                    f"{each['start']} to {each['end']} cannot all be"
                )
        between = self._averager.exchange
        saver, mine = section["saved_by"], [between.rank, between.world_size]
        if any(step > each["synced"] for each in rounds) and saver != mine:
            raise CheckpointError(
                "the checkpoint was taken by rank {} of {} inside a round, and holds that rank's "
                "local progress alone: only states that were saved between rounds (sync.next_sync "
                "is None) fit another number of ranks".format(*saver)
            )


_ROUND = {
    **dict.fromkeys(("start", "end", "synced"), checkpoint.count),
    "lrs": checkpoint.list_of(checkpoint.number),
    "lr_sum": checkpoint.number,
}
_SECTION = checkpoint.record(
    **dict.fromkeys(("schedule", "compress", "outer", "moments"), checkpoint.text),
    **dict.fromkeys(("total_steps", "warmup_steps", "step", "syncs", "weights"), checkpoint.count),
    saved_by=checkpoint.list_of(checkpoint.count, length=2),
    fragments=checkpoint.list_of(
        checkpoint.record(names=checkpoint.list_of(checkpoint.text), **_ROUND)
    ),
)
