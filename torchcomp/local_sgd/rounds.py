"""Rounds: a fragment's round, a step of all optimizers, a synchronisation, and late parameters."""

import logging
import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import accumulate, chain, pairwise
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torchcomp import checkpoint
from torchcomp.bucket import Group, merge, partition
from torchcomp.ddp.checks import bucket_caps, check_not_joined, trained_parameters
from torchcomp.errors import CheckpointError, ScheduleError, UnsupportedModelError
from torchcomp.local_sgd.averages import (
    Averages,
    OverlappedAverages,
    PseudoGradients,
)
from torchcomp.local_sgd.optimizer_state import OptimizerState
from torchcomp.local_sgd.options import (
    Levels,
    LocalMethod,
    Parameters,
    check_no_hook,
    check_no_other_scaler,
    check_values,
    held_by,
)
from torchcomp.schedules import Schedule
from torchcomp.stats import Stats
from torchcomp.traffic import sum_bytes

_log = logging.getLogger(__package__)

_SAME_LR = "The learning rate is the same function of the step on all ranks."
_FIRST_STEP = f"{checkpoint.ONE_STEP} {_SAME_LR}"
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
class Round:
    """The round of one fragment that is in progress, or the last one."""

    start: int = 0  # steps before it
    end: int = 0  # the step, counted from 1, at whose end it synchronises
    synced: int = 0  # the step at whose end the fragment synchronised last
    lrs: list[float] = field(default_factory=list)  # of each parameter group at its first step
    lr_sum: float = 0.0  # over the steps since the last synchronisation, the largest of each

    def __str__(self) -> str:
        return f"{self.start} to {self.end}"


@dataclass
class Clock:
    """One rank's clock: its steps, skipped ones included, its synchronisations and its rounds.

    Ranks may well do different things for one step (accumulate another number of micro-batches,
    look at an output), but a step without any forward pass in training is one that was lost.
    """

    total_steps: int
    rounds: list[Round]
    step: int = 0
    syncs: int = 0
    forward: bool = False  # whether a forward pass in training has begun since the last step
    missing: int = 0  # steps before which there was none

    @property
    def next_sync(self) -> int | None:
        """The end of the round in progress that ends first; None if there is none."""
        return min((each.end for each in self.rounds if self.step > each.synced), default=None)

    def warn_inside_round(self) -> None:
        """Log that local steps end where the ranks' parameters differ, if they do.

        A script that ends inside a round has as many models as ranks, and may not know it.
        """
        if self.next_sync is not None:
            _log.warning(
                "local steps ended at step %d of %d, inside the round from %s: the ranks' "
                "parameters differ, and what one rank evaluates or saves is its own model only",
                self.step,
                self.total_steps,
                " and ".join(map(str, self.rounds)),
            )


@dataclass
class Fragment:
    """Parameters that are averaged together, in rounds of their own.

    Mostly there is one, of all parameters. There are several where each optimizer has its own
    schedule, and in streaming (``fragments=P``), where they take turns so that less is sent at a
    time.
    """

    names: Group
    schedule: Schedule
    owners: tuple[int, ...]  # indices of the optimizers whose learning rates the schedule reads
    phase: tuple[int, int]  # the part of a round, as a fraction, that the run's first one takes
    groups: tuple[Group, ...] = ()  # what is averaged in one bucket
    round: Round = field(default_factory=Round)

    def begin_round(self, step: int, lrs: list[float], method: LocalMethod) -> None:
        """Fix the length of the round that the next step begins, after `step` others.

        The schedule reads the largest of `lrs`, or 0; if it cannot, ScheduleError is raised and
        nothing changes.
        """
        lr, total = max(lrs, default=0.0), method.horizon.total_steps
        end = self.schedule.round_end(step, lr, method.horizon)
        if step == 0:
            numerator, denominator = self.phase
            end = -(-end * numerator // denominator)
        self.round.start, self.round.end, self.round.lrs = step, end, lrs
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


def fragments_of(
    method: LocalMethod, optimizers: Sequence[torch.optim.Optimizer], parameters: Parameters
) -> list[Fragment]:
    """The parameters of every schedule, cut into pieces with rounds out of phase.

    Pieces are of about equal bytes, in registration order. The first round of piece p of P takes
    (p + 1)/P of a round, so they synchronise in turn, as in Streaming DiLoCo (Douillard et al.,
    2025, arXiv 2501.18512); its delayed application of what was exchanged is left out, because it
    is another algorithm. All synchronise at the end.
    """
    pieces = method.fragments
    owned = [(tuple(parameters), tuple(range(len(optimizers))))]
    if len(method.schedules) > 1:
        owned = [(held_by(each, parameters), (index,)) for index, each in enumerate(optimizers)]
    found = []
    for (names, owners), schedule in zip(owned, method.schedules, strict=True):
        sizes = [parameters[name].nbytes for name in names]
        middles = [end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True)]
        fair = [int(pieces * middle / max(sum(sizes), 1)) for middle in middles]
        for index, (start, stop) in enumerate(pairwise(piece_bounds(fair, pieces))):
            found.append(Fragment(names[start:stop], schedule, owners, (index + 1, pieces)))
    return found


def piece_bounds(fair: Sequence[int], pieces: int) -> list[int]:
    """Where pieces begin and end if each parameter goes to its fair piece, and none is empty."""
    bounds = [sum(piece < index for piece in fair) for index in range(pieces)] + [len(fair)]
    for index in range(1, pieces):
        bounds[index] = max(bounds[index], bounds[index - 1] + 1)
    for index in reversed(range(1, pieces)):
        bounds[index] = min(bounds[index], bounds[index + 1] - 1)
    return bounds


class LocalSteps:
    """Local steps of one model, without the hooks that drive them.

    Model and optimizers are held weakly, because the optimizers' hooks own what owns this.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizers: Sequence[torch.optim.Optimizer],
        method: LocalMethod,
        levels: Levels,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self._model = weakref.ref(model)
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self.method = method
        self.levels = levels
        self._scaler = scaler
        trained = dict(trained_parameters(model))
        self._fragments = fragments_of(method, optimizers, trained)
        for fragment in self._fragments:
            groups = partition([(n, trained[n]) for n in fragment.names], bucket_caps(model))
            whole = method.aggregator.whole_model
            fragment.groups = merge(groups, trained) if whole else groups
        names = {name for fragment in self._fragments for name in fragment.names}
        every_group = [group for fragment in self._fragments for group in fragment.groups]
        kind = PseudoGradients if not method.plain else Averages
        self.averages = (OverlappedAverages if method.overlap else kind)(
            method, levels, {name: p for name, p in trained.items() if name in names}, every_group
        )
        self._averager = self.averages.averager
        self._optimizer_state = OptimizerState(method.moments, levels.between)
        self.clock = Clock(method.horizon.total_steps, [each.round for each in self._fragments])
        self._reads_lr = method.outer is not None and method.outer.reads_lr
        self._stepped: set[int] = set()
        # What DDP reduces, and what is known: averaged already, or not to be, as DDP ignores it.
        self._reduced = {id(parameter) for parameter in trained.values()}
        named = model.module.named_parameters()
        self._known = {id(p) for name, p in named if name in model.parameters_to_ignore}
        self._known |= {id(parameter) for parameter in self._averager.parameters.values()}
        self._added: list[str] = []
        self._expected_weights: int | None = None
        # Whether a rank alone has loaded a checkpoint shows only when all ranks look.
        self._verified = False

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that are alive."""
        alive = [held() for held in self._optimizers]
        return [optimizer for optimizer in alive if optimizer is not None]

    @property
    def stats(self) -> Stats:
        """Counters of this rank."""
        return replace(self._averager.stats, steps=self.clock.step, syncs=self.clock.syncs)

    @property
    def within_step(self) -> bool:
        """Whether some optimizers, but not all, were stepped in the step in progress."""
        return bool(self._stepped)

    # A step.

    def begin(self, index: int) -> None:
        """The optimizer of this index is about to step."""
        if index in self._stepped:
            waiting = min(set(range(len(self._optimizers))) - self._stepped)
            raise ScheduleError(
                f"optimizer {index} was stepped twice before optimizer {waiting} was stepped once: "
                "with several optimizers, a step counts when each has been stepped once"
            )
        if not self._stepped:
            self._begin_step()

    def end(self, index: int) -> None:
        """It has stepped, or was skipped; after the last one, the ranks may synchronise."""
        self._stepped.add(index)
        if len(self._stepped) == len(self._optimizers):
            self._stepped.clear()
            self._end_step()

    def _begin_step(self) -> None:
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
            self.levels.build("the first local step", {}, self._first_step, _FIRST_STEP)
            self.averages.start(group for each in self._fragments for group in each.groups)
            self._expected_weights = None
            self._verified = True

    def _begin_rounds(self) -> None:
        for fragment in self._fragments:
            if fragment.round.end == self.clock.step:
                lrs = lrs_of(self._owners(fragment))
                fragment.begin_round(self.clock.step, lrs, self.method)

    def _first_step(self) -> tuple[None, dict[str, Any]]:
        """Check the step that follows the start or a checkpoint, and what ranks must share."""
        check_no_other_scaler(self.optimizers, self._scaler)
        model, two_levels = self._model(), self.levels.inside is not None
        if model is not None and not two_levels:
            check_no_hook(model)
        must_be_equal = self.averages.needs_equal_start or two_levels
        digest = None
        if self._expected_weights is not None or must_be_equal:
            digest = digest_of(self._averager.parameters)
        if self._expected_weights not in (None, digest):
            raise CheckpointError(
                "parameters that are not those of the checkpoint: every rank loads its own weights "
                "after DistributedDataParallel(...), whose constructor copies rank 0's to all ranks"
            )
        compared = must_be_equal and self.clock.next_sync is None
        self._begin_rounds()
        facts: dict[str, Any] = {
            "step": self.clock.step,
            "round": ", ".join(map(str, self.clock.rounds)),
            "learning rates at its start": [each.lrs for each in self.clock.rounds],
        }
        return None, facts | ({"checksum of the parameters": digest} if compared else {})

    def _end_step(self) -> None:
        clock = self.clock
        clock.step += 1
        clock.missing += not clock.forward
        clock.forward = False
        due = []
        for fragment in self._fragments:
            # Where nothing reads it, no step waits for a learning rate that a device holds.
            lrs = lrs_of(self._owners(fragment), wait=self._reads_lr)
            fragment.round.lr_sum += max(lrs, default=0.0)
            if fragment.round.end == clock.step:
                due.append(fragment)
        if due:
            self._synchronise(due)

    def _owners(self, fragment: Fragment) -> list[torch.optim.Optimizer]:
        optimizers = self.optimizers
        return [optimizers[index] for index in fragment.owners]

    # A synchronisation.

    def _synchronise(self, due: list[Fragment]) -> None:
        """End the round of every fragment that is due, on all ranks or, with an error, on none."""
        step, averages, optimizers = self.clock.step, self.averages, self.optimizers
        names = [name for fragment in due for name in fragment.names]
        parameters = {name: self._averager.parameters[name] for name in names}

        def facts() -> tuple[None, dict[str, Any]]:
            self._optimizer_state.check(parameters, optimizers)
            rounds = [fragment.round for fragment in due]
            return None, {
                "steps": step,
                "round": ", ".join(map(str, rounds)),
                "steps without forward passes in training": self.clock.missing,
                "learning rates at its start": [each.lrs for each in rounds],
                "sum of the learning rates of its steps": [each.lr_sum for each in rounds],
                "parameters added": ", ".join(self._added) or "none",
            }

        self.levels.build("synchronisation", {}, facts, _LOST_STEP)
        self._averager.begin()
        self._optimizer_state.exchange(parameters, optimizers, step)
        groups, dense_bytes = [], 0
        for fragment in due:
            steps = step - fragment.round.synced
            groups += [(group, fragment.round.lr_sum / steps) for group in fragment.groups]
            nbytes = sum(self._averager.parameters[name].nbytes for name in fragment.names)
            dense_bytes += steps * sum_bytes(nbytes, self.levels.between.world_size)
        averages.exchange(groups, step, dense_bytes)
        averages.commit()
        self._optimizer_state.commit(parameters, optimizers)
        for fragment in due:
            fragment.round.synced, fragment.round.lr_sum = step, 0.0
        self.clock.syncs += 1
        self._added.clear()
        if step == self.clock.total_steps:
            averages.wait()  # nothing follows that the last average could overlap with

    # Parameters that begin to be trained after local steps have begun.

    def _take_in_late(self) -> None:
        """Average what the optimizers have begun to train of the model, before its first change."""
        for index, optimizer in enumerate(self.optimizers):
            late = []
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.requires_grad and id(parameter) not in self._known:
                        late.append(id(parameter))
            model = self._model()
            if late and model is not None:
                new = {
                    name.replace("_orig_mod.", ""): parameter
                    for name, parameter in model.module.named_parameters()
                    if id(parameter) in late
                }
                if new:
                    self._add(model, index, new)

    def _add(self, model: DistributedDataParallel, index: int, new: Parameters) -> None:
        unknown = [name for name, parameter in new.items() if id(parameter) not in self._reduced]
        if unknown and self.levels.inside is not None:
            raise UnsupportedModelError(
                f"parameter '{unknown[0]}' was frozen or not in the model when "
                "DistributedDataParallel was built, which does not reduce its gradients inside the "
                "nodes: close(), build DistributedDataParallel anew, and LocalSGD after it"
            )
        check_values(model)
        groups = partition(new.items(), bucket_caps(model))
        home = [fragment for fragment in self._fragments if index in fragment.owners][-1]
        home.names, home.groups = (*home.names, *new), (*home.groups, *groups)
        self._known |= {id(parameter) for parameter in new.values()}
        self._averager.add(new, groups)
        self.averages.start(groups, late=True)
        digest = digest_of(new) if self.averages.needs_equal_start else 0
        self._added.append(f"{', '.join(new)} (checksum {digest})")

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`torchcomp.LocalSGD.state_dict`."""
        between = self.levels.between
        return {
            **self._averager.state_dict(),
            "local_sgd": {
                **self._fixed(),
                "step": self.clock.step,
                "syncs": self.clock.syncs,
                "saved_by": [between.rank, between.world_size],
                "weights": digest_of(self._averager.parameters),
                "fragments": [
                    {"names": list(each.names), **asdict(each.round)} for each in self._fragments
                ],
            },
        }

    def load_state_dict(self, state: Any) -> None:
        """See :meth:`torchcomp.LocalSGD.load_state_dict`."""
        section: Any = state.get("local_sgd") if isinstance(state, Mapping) else None
        checkpoint.check(section, _SECTION, "local_sgd")
        self._check(section)
        prepared = self._averager.prepare(state, _OTHER_RANKS)
        divided = self._divided(section["fragments"], state["groups"])
        self._averager.restore(prepared)
        self.clock.step, self.clock.syncs = section["step"], section["syncs"]
        for fragment, saved, groups in zip(
            self._fragments, section["fragments"], divided, strict=True
        ):
            fragment.names, fragment.groups = tuple(saved["names"]), groups
            for each in fields(Round):
                setattr(fragment.round, each.name, saved[each.name])
        self._expected_weights = section["weights"]
        self._verified = False

    def _fixed(self) -> dict[str, Any]:
        """What must not change from a checkpoint to the run that loads it."""
        return {
            "schedule": self.method.spec,
            "total_steps": self.method.horizon.total_steps,
            "warmup_steps": self.method.horizon.warmup_steps,
            "compress": str(self.method.aggregator),
            "outer": str(self.method.outer),
            "moments": self.method.moments,
        }

    def _check(self, section: dict[str, Any]) -> None:
        """Require a section of this run, of this rank or of all, and with a clock that can be."""
        rounds = section["fragments"]
        here = {**self._fixed(), "fragments": len(self._fragments)}
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
        between = self.levels.between
        saver, mine = section["saved_by"], [between.rank, between.world_size]
        if any(step > each["synced"] for each in rounds) and saver != mine:
            raise CheckpointError(
                "the checkpoint was taken by rank {} of {} inside a round, and holds that rank's "
                "local progress alone: only states that were saved between rounds (sync.next_sync "
                "is None) fit another number of ranks".format(*saver)
            )

    def _divided(
        self, fragments: list[dict[str, Any]], saved: Iterable[Iterable[str]]
    ) -> list[tuple[Group, ...]]:
        """The groups of each fragment; the averager has checked that they hold each name once."""
        groups = [tuple(group) for group in saved]
        divided = [tuple(g for g in groups if g[0] in each["names"]) for each in fragments]
        whole = sum(len(each["names"]) for each in fragments) == len(self._averager.parameters)
        for each, own in zip(fragments, divided, strict=True):
            if not whole or sorted(each["names"]) != sorted(chain.from_iterable(own)):
                raise CheckpointError(
                    "a damaged checkpoint: local_sgd.fragments must hold every parameter once, and "
                    "whole groups"
                )
        return divided


def lrs_of(optimizers: Iterable[torch.optim.Optimizer], wait: bool = True) -> list[float]:
    """The learning rates of the parameter groups that have a number as "lr".

    Without `wait` there are none if a device holds one, because to read it would wait for it.
    """
    lrs = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            lr = group.get("lr")
            if isinstance(lr, Tensor) and not (wait or lr.is_cpu):
                return []
            if isinstance(lr, float | Tensor | Real):
                lrs.append(float(lr))
    return lrs


_ROUND = {"start": checkpoint.count, "end": checkpoint.count, "synced": checkpoint.count} | {
    "lrs": checkpoint.list_of(checkpoint.number),
    "lr_sum": checkpoint.number,
}
_SECTION = checkpoint.record(
    schedule=checkpoint.text,
    total_steps=checkpoint.count,
    warmup_steps=checkpoint.count,
    compress=checkpoint.text,
    outer=checkpoint.text,
    moments=checkpoint.text,
    step=checkpoint.count,
    syncs=checkpoint.count,
    saved_by=checkpoint.list_of(checkpoint.count, length=2),
    weights=checkpoint.count,
    fragments=checkpoint.list_of(
        checkpoint.record(names=checkpoint.list_of(checkpoint.text), **_ROUND)
    ),
)


def digest_of(tensors: Mapping[str, Tensor]) -> int:
    """A checksum of all values, to recognise them."""
    checksum = 0
    for tensor in tensors.values():
        flat = tensor.detach().cpu().contiguous().view(-1)
        checksum = zlib.crc32(flat.view(torch.uint8).numpy().tobytes(), checksum)
    return checksum
