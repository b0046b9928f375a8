"""Auto: time the candidates of ``register(model, "auto")``, and go on with the best.

Training goes on as plain DDP. An observer copies the gradients of a step. Between this step and the
next one, a candidate averages the copies, with an averager of its own. At the end, the step model
hides what the exchanges took behind the measured backward pass.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket

from torchcomp.advisor.links import Link
from torchcomp.advisor.moments import Moment, now, seconds
from torchcomp.advisor.simulation import Compute, Recording, Submitted, Work, simulate
from torchcomp.aggregators import Aggregator
from torchcomp.aggregators.rehearsal import rehearse_all
from torchcomp.checkpoints import checkpoint
from torchcomp.ddp.executors import after_backward
from torchcomp.ddp.hook import DDPHandle, Future
from torchcomp.ddp.reordering import Reordering
from torchcomp.engine import host
from torchcomp.engine.averager import Averager
from torchcomp.engine.bucket import Bucket
from torchcomp.engine.observer import Observer
from torchcomp.exchange import Exchange, InProcessExchange
from torchcomp.specs.auto import BLOCK, MEAN, SETTLE
from torchcomp.specs.component import Component
from torchcomp.specs.errors import SpecError
from torchcomp.specs.spec import parse_aggregator

_log = logging.getLogger(__name__)

WORTH = 1.05  # a method is chosen over those before it if it is this many times as fast
_H = 8  # of the local steps that are proposed


@dataclass(frozen=True)
class Choice:
    """What a trial has measured and chosen. It is the same on all ranks.

    Attributes:
        method: spec of the chosen method.
        seconds: of a step with each method, by spec, on the slowest rank: measured for ``mean``,
            predicted for the others from what their exchanges took.
        alone: seconds of a step until its gradients are computed.
        average: seconds of an uncompressed average of all gradients.
        step: number of steps that had finished.
    """

    method: str
    seconds: Mapping[str, float]
    alone: float
    average: float
    step: int

    def __str__(self) -> str:
        mean, best = self.seconds["mean"], self.seconds[self.method]
        why = f"a step is {mean / best:.2f} times as fast as with mean"
        if self.method == "mean":
            fastest = min(s for each, s in self.seconds.items() if each != "mean")
            why = f"no candidate is {WORTH:.2f} times as fast (the fastest: {mean / fastest:.2f})"
        steps = ", ".join(f"{each} {1000 * s:.3g} ms" for each, s in self.seconds.items())
        text = f"auto: from step {self.step + 1} on {self.method}, because {why}. A step: {steps}"
        local = self.alone + self.average / _H
        if local * WORTH < best:
            text += f". LocalSGD with 'every({_H})' would take about {1000 * local:.3g} ms"
            text += "; it trains in another way, so auto only proposes it"
        return text


class Copies(Observer):
    """An observer that copies the gradients of a step before they are averaged."""

    wanted = False  # whether it does so in the next step

    def begin(self, ratios: Mapping[str, float]) -> None:
        self.buckets: list[Bucket] = []

    def before(self, bucket: Bucket, method: Aggregator) -> None:
        if self.wanted:
            self.buckets.append(Bucket(bucket.shape, bucket.flat.clone()))


class Hidden:
    """The step model, with a measured backward pass, of `alone` seconds in a step of `step`."""

    def __init__(self, passes: Sequence[Sequence[Moment]]) -> None:
        # Moments of each step: its begin, each bucket that was ready, the last gradient, its end.
        starts, *others = zip(*passes, strict=True)
        *ready, self.alone, self.step = (median(map(seconds, starts, each)) for each in others)
        # Cores that the step keeps busy. On CUDA, one thread launches it, and an exchange as well.
        self._cores = max(1.0, median(map(_worked, starts, others[-2])) / self.alone)
        names = tuple((str(number),) for number in range(len(ready)))
        self._compute = Compute(names, tuple(ready), self.alone, self.alone)

    def step_with(self, rows: Sequence[Sequence[Moment]]) -> float:
        """Return the seconds of a step that hides an exchange behind its backward pass.

        A row has the moments of one exchange: its begin, and the end of each bucket.
        """
        buckets, pairs = [], pairwise(zip(*rows, strict=True))
        for names, pair in zip(self._compute.buckets, pairs, strict=True):
            taken = median(map(seconds, *pair))
            # Work competes with the computation of gradients.
            work = min(taken, median(map(_worked, *pair)) / self._cores)
            buckets.append(Submitted(names, (Work(taken - work),), work))
        # The rest waits for other ranks, as if it had a core of its own. No link is left to model.
        recording, no_link = Recording("", tuple(buckets)), Link(1.0).among(1)
        return simulate(recording, self._compute, no_link, cores=2.0).seconds


def _worked(first: Moment, last: Moment) -> float:
    return last.work - first.work


_CHOICE = {"method": checkpoint.text, "seconds": checkpoint.dict_of(checkpoint.number)}
_CHOICE |= {"alone": checkpoint.number, "average": checkpoint.number, "step": checkpoint.count}
_SECTION = checkpoint.record(
    trial=checkpoint.flag, choice=checkpoint.optional(checkpoint.record(**_CHOICE))
)


class AutoHandle(DDPHandle):
    """The handle of a DDP model whose method is chosen in at most `steps` first steps.

    It times `methods`, in the order of preference. The first is ``mean``.
    """

    def __init__(self, methods: Sequence[Aggregator], steps: int, *others: Any) -> None:
        super().__init__(*others)
        self._candidates, self._steps = tuple(methods), steps
        self._everyone, self._guard = self._buckets.everyone, self.averager.observers
        self._start: Moment | None = None  # of the step that runs
        self._end: Moment | None = None  # of the last one
        self._moments: list[Moment] = []  # of the step that runs
        self._begin_trial()

    def _begin_trial(self) -> None:
        """Go on uncompressed, and time the candidates as soon as the residual was sent."""
        if self.averager.aggregator != MEAN:
            self.averager.use(MEAN)
        self.choice, self._trial, self._since = None, True, self.averager.step
        self._methods = self._candidates
        self._timed: Any = None  # averages copies with a candidate
        self._passes: list[list[Moment]] = []
        self._rows: list[list[list[Moment]]] = [[] for _ in self._candidates]
        self._copies = copies = Copies()
        self.averager.observers = (*self._guard, copies)
        if self._everyone.rank == 0:
            names = ", ".join(map(str, self._methods))
            _log.info("auto: at most %d steps are uncompressed, and time %s", self._steps, names)

    def _end_trial(self, choice: Choice | None) -> None:
        self.choice, self._trial = choice, False
        self._timed, self._copies, self.averager.observers = None, Copies(), self._guard

    # --- One step ---

    def _enter_pass(self) -> None:
        super()._enter_pass()
        self._start, self._end, self._moments = self._end, None, []
        done = self.averager.step - self._since - SETTLE
        self._copies.wanted = done > 0 and done % BLOCK > 0

    def _receive(self, grad_bucket: GradBucket) -> Future:
        if not self._trial:
            return super()._receive(grad_bucket)
        ready = now(self._everyone.device)
        future = super()._receive(grad_bucket)
        self._moments.append(ready)
        return future

    def _finish_backward(self) -> None:
        if self._trial:
            self._moments.append(now(self._everyone.device))
        super()._finish_backward()
        if self._trial:
            after_backward(self._between)  # not if the step has failed

    def _between(self) -> None:
        averager = self.averager
        self._moments.append(now(self._everyone.device))
        if averager.flushing:
            self._since = averager.step
        try:
            self._try(averager.step - self._since - SETTLE)
        except Exception:
            averager.abandon(self._step_before)
            averager.abandoned = False  # no job is left
            raise
        self._end = now(self._everyone.device)

    def _try(self, step: int) -> None:
        """Time a step, or a candidate after it. All ranks do so with the same step, from 1 on."""
        if step == 0:
            self._leave_out()
        if step <= 0:
            return
        (block, place), count = divmod(step - 1, BLOCK), len(self._methods)
        method, rows = self._methods[block % count], self._rows[block % count]
        if place == 0:
            if self._start is not None:
                self._passes.append([self._start, *self._moments])
            self._timed = self._averager_of(method, self.averager.exchange)
        elif place == 1:
            self._exchange(method)  # these two allocate, and do not count
            self._exchange(method)
        else:
            rows.append(self._exchange(method))
        if step == (self._steps - SETTLE) // (BLOCK * count) * BLOCK * count:
            self._choose()

    def _exchange(self, method: Aggregator) -> list[Moment]:
        """Average the copies; return the begin, and the end of each bucket."""
        timed, buckets = self._timed, self._copies.buckets
        reordering = Reordering([timed.shape_of(group) for group in timed.buckets])
        self._agree([0])  # the ranks begin together
        moments = [now(self._everyone.device)]
        try:
            timed.begin()
            for bucket in buckets:
                host.keep_for_this_stream(bucket.flat)
                for group in reordering.add(bucket) if timed.grouped else (bucket,):
                    timed.average(group)
                if bucket is buckets[-1]:
                    timed.finish(may_skip=True)  # a NaN has no consequence here
                moments.append(now(self._everyone.device))
        except Exception:
            _log.error("auto: the candidate '%s' failed: leave it out of candidates", method)
            raise
        return moments

    def _averager_of(self, method: Aggregator, exchange: Exchange) -> Averager:
        used, checksum = self.averager, self.averager.exchange.checksum
        options: dict[str, Any] = {"seed": used.seed, "checksum": checksum}
        return Averager(method.settled, exchange, used.parameters, used.groups, **options)

    def _leave_out(self) -> None:
        """Leave out candidates that fail on some rank, such as for lack of memory."""
        mean, *others = self._candidates
        failed = self._agree([self._fails(each) for each in others])
        self._methods = mean, *(m for m, out in zip(others, failed, strict=True) if not out)
        if self._methods == (mean,):
            self._end_trial(None)

    def _fails(self, method: Aggregator) -> bool:
        """Try a method on this rank alone, with buckets as large as in training."""
        try:
            averager = self._averager_of(method, InProcessExchange.alone(self._everyone.device))
            averager.average_all({n: torch.ones_like(p) for n, p in averager.parameters.items()})
        except Exception:
            _log.warning("auto: '%s' failed, and is left out on all ranks", method, exc_info=True)
            return True
        return False

    def _agree(self, numbers: Sequence[int]) -> list[int]:
        """Return the elementwise maximum over all ranks. The slowest one counts."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=self._everyone.device)
        agreed: list[int] = self._everyone.all_reduce_max(mine).tolist()
        return agreed

    def _choose(self) -> None:
        self.averager.settle()  # where the callback of a guard may swap the method
        if not self._trial:
            return
        hidden = Hidden(self._passes)
        average = median(seconds(row[0], row[-1]) for row in self._rows[0])
        steps = [hidden.step_with(rows) for rows in self._rows[: len(self._methods)]]
        # What the model does not know, such as the wait for the slowest rank, is in all of them.
        steps = [max(hidden.alone, hidden.step - steps[0] + each) for each in steps]
        numbers = [round(1e9 * each) for each in (*steps, hidden.alone, average)]
        *steps, alone, average = (each / 1e9 for each in self._agree(numbers))
        best = next(i for i, each in enumerate(steps) if each <= WORTH * min(steps))
        by_method = {str(each): s for each, s in zip(self._methods, steps, strict=True)}
        method, step = self._methods[best], self.averager.step
        self._end_trial(Choice(str(method), by_method, alone, average, step))
        if self._everyone.rank == 0:
            # A warning: without a logger of its own, a script would not show what was chosen.
            _log.warning("%s", self.choice)
        if method != MEAN:
            self.averager.use(method)

    # --- Between two steps ---

    def swap(self, spec: str | Component) -> str:
        told = super().swap(spec)
        self._end_trial(None)
        return told

    def state_dict(self) -> dict[str, Any]:
        choice = None if self.choice is None else asdict(self.choice)
        return {**super().state_dict(), "auto": {"trial": self._trial, "choice": choice}}

    def load_state_dict(self, state: Any) -> None:
        saved = state.get("auto") if isinstance(state, dict) else None
        # Without a section, the checkpoint is that of a run with a method of its own.
        section: dict[str, Any] = {"trial": True, "choice": None} if saved is None else saved
        _SECTION(section, "auto")
        super().load_state_dict(state)
        choice = section["choice"]
        if section["trial"] or (choice and self.averager.aggregator not in self._candidates):
            self._begin_trial()
        else:
            self._end_trial(choice and Choice(**{name: choice[name] for name in _CHOICE}))

    def _method_of(self, state: Any) -> Aggregator | None:
        spec = state.get("spec") if isinstance(state, dict) else None
        # By name first: a candidate can be an object of a class of the user.
        known = next((each for each in self._candidates if str(each) == spec), None)
        try:
            method = known or parse_aggregator(spec if isinstance(spec, str) else "mean")
        except SpecError:
            return None  # the header is checked next, and refused
        rehearse_all(method, self.averager.parameters.values())
        return method
