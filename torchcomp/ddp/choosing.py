"""Choosing: time the candidates of ``auto`` on copies of DDP's buckets, and go on with the best.

In a step of a trial, the candidate averages a copy of each bucket during the backward pass. When
the backward pass ends, the buckets themselves are averaged uncompressed, as in plain DDP: training
does not notice. The time of this second average is not counted.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchcomp import checkpoint
from torchcomp.aggregators import Aggregator
from torchcomp.aggregators.rehearsal import rehearse_all
from torchcomp.auto import MEAN, Choice, Mark, Pace, Timed, Trial, chosen, mark, seconds_between
from torchcomp.averager import Averager
from torchcomp.bucket import Bucket, BucketShape, Names
from torchcomp.ddp.buckets import Buckets
from torchcomp.ddp.executors import Job
from torchcomp.errors import SpecError
from torchcomp.exchange import Exchange, InProcessExchange
from torchcomp.spec import parse_aggregator

_log = logging.getLogger(__name__)

_PATIENCE = 10
"""Steps that auto waits for the residual of the method before."""

_TRIAL, _WATCH, _ENDED = "trial", "watch", "ended"


def _phase(value: Any, where: str) -> None:
    checkpoint.require(value in (_TRIAL, _WATCH, _ENDED), where, "a phase of auto", value)


def _choice(value: Any, where: str) -> None:
    numbers = dict.fromkeys(("alone", "average"), checkpoint.number)
    seconds = checkpoint.dict_of(checkpoint.number)
    form = checkpoint.record(
        method=checkpoint.text, seconds=seconds, step=checkpoint.count, **numbers
    )
    form(value, where)
    known = {field.name for field in fields(Choice)}
    checkpoint.require(value.keys() == known, where, f"a dict of {sorted(known)}", sorted(value))
    timed = {str(MEAN), value["method"]} <= value["seconds"].keys()
    checkpoint.require(timed, f"{where}.seconds", "of all methods", sorted(value["seconds"]))


_SECTION = checkpoint.record(
    phase=_phase,
    choice=checkpoint.optional(_choice),
    reference=checkpoint.optional(checkpoint.count),
)


class Choosing(Buckets):
    """Averages DDP's buckets as usual, and times other methods on copies of them.

    Args:
        used: averages the buckets.
        methods: what is timed, in the order of preference. The first is ``mean``.
        steps: number of steps of a trial at most.
    """

    def __init__(self, used: Buckets, methods: Sequence[Aggregator], steps: int) -> None:
        super().__init__(used.averager, used.everyone, used.place, used.parameters, used.executors)
        self._used, self._candidates, self._steps = used, tuple(methods), steps
        self._methods = self._candidates  # those that are timed
        self._trial: Trial | None = Trial(len(methods), steps)
        self._rehearsed = False  # whether this trial has tried its candidates
        self._pace: Pace | None = None
        self._copies = _Copies()
        self._timed: Buckets | None = None  # averages the copies with the method that is timed
        self._timed_method = 0
        self._values: tuple[float, dict[str, float] | None] = 1.0, None  # of this step
        self._held: list[Bucket] = []  # DDP's buckets whose copies are averaged in this step
        self._held_end: Callable[..., bool] | None = None  # of the step with those buckets
        self._done: Job | None = None  # completes the futures of DDP, once the last bucket has come
        self._copying = 0.0  # seconds of this step
        self._end: Mark | None = None  # of the last step
        self._answers: list[int] = []  # whether any rank has each of the flags, once it is known
        self._verified = False  # whether the ranks have the same phase
        self._waited = 0  # steps of this phase in which the residual was sent

    # --- One step ---

    def shape_of(self, names: Names) -> BucketShape:
        return self._used.shape_of(names)

    def begin(self, scale: float, lrs: dict[str, float] | None) -> None:
        self._held.clear()
        self._copying, self._values = 0.0, (scale, lrs)
        self._timed = timed = self._to_time()
        (timed or self._used).begin(scale, lrs)

    def _to_time(self) -> Buckets | None:
        """Return what averages copies in the step that begins; None if it is an ordinary one."""
        method = 0 if self._trial is None else self._trial.method
        if method != self._timed_method:
            self._timed, self._timed_method = None, method
        if method == 0 or self._timed is not None:
            return self._timed
        averager = self._averager_of(self._methods[method], self.averager.exchange)
        return self._used.beside(averager)

    def _averager_of(self, method: Aggregator, exchange: Exchange) -> Averager:
        used = self.averager
        return Averager(method.settled, exchange, used.parameters, used.groups, seed=used.seed)

    def average(self, bucket: Bucket) -> None:
        timed = self._timed
        if timed is None:
            self._used.average(bucket)
            return
        device = self.everyone.device
        begin = mark(device)
        copy = self._copies.of(len(self._held), bucket)
        self._held.append(bucket)
        if device.type != "cuda":  # there, a copy takes next to no time
            self._copying += seconds_between(begin, mark(device))
        timed.average(copy)

    def finish(self, end: Callable[..., bool]) -> None:
        timed = self._timed
        if timed is not None:
            # Whether the gradients of the copies are finite has no consequence.
            self._held_end = end
            timed.finish(partial(timed.averager.finish, may_skip=True))
            return
        flags = [] if self._pace is None else self._pace.flags()

        def ask_and_end(**options: Any) -> bool:
            self._answers = self.averager.exchange.max_at_end(flags)
            return end(**options)

        self._used.finish(ask_and_end if flags else end)

    def complete(self, done: Job) -> None:
        self._done = done

    def join(self) -> BaseException | None:
        computed = mark(self.everyone.device)
        failure = super().join()
        done, self._done = self._done, None
        if done is None:
            return failure  # not at the end of a backward pass
        averaged = end = self._reached()
        held, self._held = self._held, []
        if held:
            self.executors[0].submit(partial(self._average_held, held))
        super().complete(done)
        super().join()
        if held:
            self._reached()
            self._kept(self._meet)
            end = mark(self.everyone.device)
        before, self._end = self._end, end
        # An error is raised with those of the exchange, after DDP has ended its step.
        self._kept(lambda: self._record(Timed(before, computed, averaged, end, self._copying)))
        failure = super().join()
        if failure is not None:
            if self._timed_method:
                _log.error(
                    "auto: this step failed while it timed the candidate '%s'. If the error below "
                    "is one of this method, leave it out of candidates",
                    self._methods[self._timed_method],
                )
            self._forget_step()
        return failure

    def _average_held(self, held: Sequence[Bucket]) -> None:
        """Average DDP's buckets themselves, after a step on copies."""
        self._used.begin(*self._values)
        for bucket in held:
            self._used.average(bucket)
        if self._held_end is not None:
            self._used.finish(self._held_end)

    def _kept(self, call: Callable[[], None]) -> None:
        """Call a function, unless the step has failed. Keep its error as that of a job."""
        if super().join() is None:
            try:
                call()
            except Exception as error:
                self.executors[0].fail(error)

    def _meet(self) -> None:
        """Wait for all ranks. One that begins the next step early would wait for others in it."""
        self.everyone.all_reduce_max(torch.zeros(1, dtype=torch.uint8, device=self.everyone.device))

    def _reached(self) -> Mark:
        """Return a mark after everything that was submitted. What follows comes after it."""
        device, found = self.everyone.device, list[Mark]()
        if device.type != "cuda":
            return mark(device)
        # The last executor has a stream of its own.
        self.executors[-1].submit(lambda: found.append(mark(device)), always=True)
        (reached,) = found
        if isinstance(reached, torch.cuda.Event):
            torch.cuda.current_stream(device).wait_event(reached)
        return reached

    def _forget_step(self) -> None:
        """Forget a step that failed, or that no other follows."""
        self._held, self._held_end, self._done = [], None, None
        self._answers = []
        self._timed, self._end, self._timed_method = None, None, 0
        if self._trial is not None:
            self._trial.restart_block()

    def abandon(self, step: int) -> None:
        if self._timed is not None:
            self._timed.averager.abandoned = True
        self._forget_step()
        super().abandon(step)

    def beside(self, averager: Averager) -> Buckets:
        return self._used.beside(averager)

    def close(self, timeout: float | None = None) -> None:
        self._used.close(timeout)
        # The phase stays: the state can be saved after this.
        self._timed, self._timed_method = None, 0
        self._copies.clear()

    # --- What the steps show ---

    def _record(self, timed: Timed) -> None:
        """Take note of a step that has ended. All ranks do so after the same step."""
        if not self._verified:
            # A rank with another phase would not take part when the others agree on times.
            section = {"auto": self._section()}
            self.everyone.verify("the first step", section, checkpoint.ONE_STEP)
            self._verified = True
        if self._trial is not None and not self._rehearsed:
            self._rehearse()
        # A residual that no step can send, of parameters that are not used any more, would keep
        # auto waiting for ever.
        self._waited += self.averager.flushing
        if self.averager.flushing and self._waited <= _PATIENCE:
            return
        if self._trial is not None:
            if self._trial.add(timed):
                self._end_round(self._trial)
        elif self._pace is not None:
            # A method that is warming up changes its own pace.
            if self.averager.step < self.averager.aggregator.stages[-1]:
                return
            # With check="late", the answers come one step later.
            if self._answers:
                answers, self._answers = self._answers, []
                if Pace.changed(answers):
                    self._look_again()
                    return
            self._pace.add(timed)
            if self._pace.reference is None and self._pace.full:
                (self._pace.reference,) = self._agree([self._pace.take()])

    def _rehearse(self) -> None:
        """Leave out candidates that fail on some rank, such as for lack of memory."""
        self._rehearsed = True
        failed = [self._fails(method) for method in self._candidates[1:]]
        left_out = [False, *map(bool, self._agree(failed))]
        pairs = list(zip(self._candidates, left_out, strict=True))
        self._methods = tuple(method for method, out in pairs if not out)
        # It is no part of the next step.
        self._end = None
        if any(left_out):
            if self.everyone.rank == 0:
                names = [str(method) for method, out in pairs if out]
                _log.warning("auto: left out, because they failed: %s", checkpoint.listed(names))
            timed = len(self._methods)
            if timed == 1:
                self.choice = None
            self._follow(Trial(timed, self._steps) if timed > 1 else None, None)

    def _fails(self, method: Aggregator) -> bool:
        """Try a method on this rank alone, with buckets as large as in training."""
        device = self.everyone.device
        try:
            averager = self._averager_of(method, InProcessExchange.alone(device))
            averager.average_all({n: torch.ones_like(p) for n, p in averager.parameters.items()})
        except Exception:
            _log.warning("auto: the candidate '%s' failed on this rank", method, exc_info=True)
            return True
        return False

    def _agree(self, numbers: Sequence[int]) -> list[int]:
        """Return the elementwise maximum over all ranks. The slowest one counts."""
        everyone = self.everyone
        mine = torch.tensor(numbers, dtype=torch.int64, device=everyone.device)
        agreed: list[int] = everyone.all_reduce_max(mine).tolist()
        return agreed

    def _end_round(self, trial: Trial) -> None:
        agreed = self._agree(trial.measured())
        if not trial.end_round(agreed):
            return
        *steps, alone, average = (number / 1e9 for number in agreed)
        method = self._methods[chosen(steps)]
        seconds = {str(each): s for each, s in zip(self._methods, steps, strict=True)}
        self.choice = Choice(str(method), seconds, alone, average, self.averager.step)
        self._follow(None, Pace())
        if self.everyone.rank == 0:
            # A warning: without a logger of its own, a script would not show what was chosen.
            _log.warning("%s", self.choice)
        if method != MEAN:
            self.averager.use(method)

    def _look_again(self) -> None:
        if self.everyone.rank == 0:
            _log.warning(
                "auto: the step time has changed by half since %s was chosen, so the candidates "
                "are timed again",
                self.averager.aggregator,
            )
        self._begin_trial()

    def _begin_trial(self) -> None:
        """Go on uncompressed, and time the candidates as soon as the residual was sent."""
        if self.averager.aggregator != MEAN:
            self.averager.use(MEAN)
        self._methods, self._rehearsed = self._candidates, False
        self._follow(Trial(len(self._methods), self._steps), None)

    def _follow(self, trial: Trial | None, pace: Pace | None) -> None:
        """Go on with a trial, with the chosen method, or with neither."""
        self._trial, self._pace, self._waited = trial, pace, 0
        self._timed, self._timed_method, self._answers = None, 0, []
        if trial is None:
            self._copies.clear()

    # --- Between two steps ---

    def use(self, aggregator: Aggregator) -> str:
        told = super().use(aggregator)
        self._follow(None, None)
        self.choice = None
        return told

    def _section(self) -> dict[str, Any]:
        phase = _ENDED if self._pace is None else _WATCH
        return {
            "phase": _TRIAL if self._trial is not None else phase,
            "choice": None if self.choice is None else asdict(self.choice),
            "reference": None if self._pace is None else self._pace.reference,
        }

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "auto": self._section()}

    def load_state_dict(self, state: Any) -> None:
        saved = state.get("auto") if isinstance(state, dict) else None
        # Without a section, the checkpoint is that of a run with a method of its own.
        fresh = {"phase": _TRIAL, "choice": None, "reference": None}
        section: dict[str, Any] = fresh if saved is None else saved
        _SECTION(section, "auto")
        choice = None if section["choice"] is None else Choice(**section["choice"])
        super().load_state_dict(state)
        self._forget_step()
        self.choice, self._verified = choice, False
        phase = section["phase"]
        if phase == _WATCH and self.averager.aggregator not in self._candidates:
            phase = _TRIAL
        if phase == _TRIAL:
            self._begin_trial()
        else:
            self._follow(None, Pace(section["reference"]) if phase == _WATCH else None)

    def _method_to_load(self, state: Any) -> Aggregator:
        spec = state.get("spec") if isinstance(state, dict) else None
        for method in self._candidates:
            # Before it is parsed: a candidate can be an object of a class of the user.
            if str(method) == spec:
                return method
        try:
            method = parse_aggregator(spec if isinstance(spec, str) else str(MEAN))
        except SpecError:
            return super()._method_to_load(state)  # the header is checked next, and refused
        rehearse_all(method, self.averager.parameters.values())
        return method


class _Copies:
    """Copies of buckets, in memory that is used again in every step."""

    def __init__(self) -> None:
        self._flats: dict[int, Tensor] = {}

    def of(self, index: int, bucket: Bucket) -> Bucket:
        """Return a copy of the bucket with this index."""
        flat = self._flats.get(index)
        if flat is None or flat.shape != bucket.flat.shape or flat.dtype != bucket.flat.dtype:
            flat = self._flats[index] = torch.empty_like(bucket.flat)
        flat.copy_(bucket.flat)
        return Bucket(bucket.shape, flat)

    def clear(self) -> None:
        """Free the memory."""
        self._flats.clear()
