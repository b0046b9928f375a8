"""Monitor: what an averager reports of its steps, and what the guard makes of it."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from torchcomp.aggregators import Aggregator
from torchcomp.bucket import Bucket, BucketShape
from torchcomp.exchange import Exchange
from torchcomp.guard.alarms import Alarm, alarms, replica_alarm
from torchcomp.guard.options import Guard
from torchcomp.guard.replicas import Replicas
from torchcomp.guard.report import Report
from torchcomp.guard.watch import Found, Watch
from torchcomp.kernels import follow
from torchcomp.state import State

_log = logging.getLogger(__name__)

_LONGEST = 64
"""Longest pause, in comparisons."""

MENDED = ("imbalance", "lost", "starved", "residual changed")
"""Kinds of alarms that an uncompressed average ends."""


class Monitor:
    """The monitor of an averager without a guard: it ignores what it is told.

    Attributes:
        alarms: what the last comparison found wrong.
    """

    def __init__(self) -> None:
        self.alarms: tuple[Alarm, ...] = ()

    @property
    def report(self) -> Report | None:
        """The last comparison, or None before the first one."""
        return None

    def use(
        self, method: Aggregator, shapes: Iterable[BucketShape], devices: Iterable[torch.device]
    ) -> None:
        """Prepare for a method, before training.

        Args:
            method: the one that is used from now on.
            shapes: of its buckets.
            devices: of the parameters.

        Raises:
            SpecError: if the method's law is not about its slots.
        """

    def locate(self) -> None:
        """Find out which parameters of the replicas differ, if any do. All ranks call this."""

    def begin(
        self,
        step: int,
        method: Aggregator,
        shapes: Callable[[], Iterable[BucketShape]],
        ratios: Mapping[str, float],
    ) -> None:
        """Begin a step.

        Args:
            step: number of steps before it.
            method: the method of this step.
            shapes: returns the shapes of all its buckets.
            ratios: by parameter name, what the residual was multiplied by since the last step.
        """

    def before(self, bucket: Bucket, method: Aggregator) -> None:
        """Read a bucket that `method` is about to average."""

    def after(self, bucket: Bucket, method: Aggregator, state: State) -> None:
        """Read a bucket that `method` has averaged."""

    def measure(self, step: int) -> None:
        """Measure what is compared, if it is time to, at the end of a step.

        Args:
            step: number of steps that have finished, with this one.
        """

    def send(self) -> None:
        """Start to add up over the ranks what was measured. All ranks call this."""

    def receive(self) -> None:
        """Wait for the sums over the ranks, if any are on their way.

        Raises:
            RankFailureError: if another rank is lost. The comparison is then discarded.
        """

    def undo(self, names: Iterable[str]) -> None:
        """The step in flight does not change the residual of these parameters."""

    def forget(self) -> None:
        """The next step does not continue the last one: the state has changed in between."""

    def discard(self) -> None:
        """The last step does not count."""

    def change_ranks(self, exchange: Exchange) -> None:
        """Go on over another exchange."""

    def settle(self, step: int) -> frozenset[str]:
        """Judge the last comparison, of which the sums were received. The same on all ranks.

        Args:
            step: number of steps that have finished.

        Returns:
            The parameters that the next step averages uncompressed.
        """
        return frozenset()

    def state_dict(self) -> dict[str, list[int]]:
        """Return what decides how later steps are averaged: the pauses, by parameter name."""
        return {}

    def load_state_dict(self, state: Mapping[str, Sequence[int]]) -> None:
        """Restore the result of :meth:`state_dict`. Nothing is known of the last step."""


@dataclass(frozen=True)
class Pause:
    """A parameter that is averaged uncompressed, or was until it recovered.

    Attributes:
        until: number of steps after which the method gets it back.
        steps: length of the pause. If the alarm returns soon after it, the next one is twice as
            long, up to a limit.
    """

    until: int
    steps: int


@dataclass
class _Compared:
    """A comparison that is not yet judged.

    Attributes:
        step: number of steps that had finished.
        numbers: what the ranks add up.
        own: how many of them are from the steps. The others are from the replicas.
        read: reads those.
        wait: waits for the sums over the ranks; None before they are sent.
        sums: what was received.
    """

    step: int
    numbers: Tensor
    own: int
    read: Callable[[Tensor], Found]
    wait: Callable[[], Tensor] | None = None
    sums: Tensor | None = None


@dataclass(frozen=True)
class _Judged:
    """A comparison that was judged, after `step` steps."""

    step: int
    found: Found

    @cached_property
    def report(self) -> Report:
        """The ratios, made when they are asked for: they are more work than judging the sums."""
        return self.found.report(self.step)


class GuardMonitor(Monitor):
    """The monitor of an averager with a guard.

    Args:
        guard: the options.
        exchange: the ranks that average.
        names: of all parameters.
        replicas: compares the parameters, if they are known.
    """

    def __init__(
        self,
        guard: Guard,
        exchange: Exchange,
        names: Iterable[str],
        replicas: Replicas | None = None,
    ) -> None:
        super().__init__()
        self._guard, self._names, self._replicas = guard, tuple(names), replicas
        self._watch = Watch(guard.every, guard.age, exchange)
        # Parameters that are, or were, averaged uncompressed.
        self._pauses: dict[str, Pause] = {}
        self._compared: _Compared | None = None
        # What replicas are compared by, and whether they differed in it: it is then kept.
        self._dimension, self._differ = 0, False
        self._judged: _Judged | None = None  # the last comparison
        # Alarms of a comparison after which it is not known yet which replicas differ.
        self._unlocated: list[Alarm] | None = None

    @property
    def report(self) -> Report | None:
        judged = self._judged  # another thread can end a comparison meanwhile
        return None if judged is None else judged.report

    def use(
        self, method: Aggregator, shapes: Iterable[BucketShape], devices: Iterable[torch.device]
    ) -> None:
        for shape in shapes:
            self._watch.check(method.at(0), shape)  # all stages have the same slots
        for device in devices:
            follow.rehearse(device)

    def locate(self) -> None:
        if self._unlocated is None or self._judged is None or self._replicas is None:
            return
        judged, self._unlocated = self._unlocated, None
        found = self._replicas.differing(self._watch.exchange)
        self._publish([*judged, *([replica_alarm(self._judged.step, found)] if found else [])])

    def begin(
        self,
        step: int,
        method: Aggregator,
        shapes: Callable[[], Iterable[BucketShape]],
        ratios: Mapping[str, float],
    ) -> None:
        self._watch.begin(step, method, shapes, ratios)

    def before(self, bucket: Bucket, method: Aggregator) -> None:
        self._watch.before(bucket, method)

    def after(self, bucket: Bucket, method: Aggregator, state: State) -> None:
        self._watch.after(bucket, method, state)

    def measure(self, step: int) -> None:
        measured = self._watch.finish()
        if measured is None:
            return
        numbers, read = measured
        device, own = self._watch.exchange.device, numbers.numel()
        if self._replicas is not None:
            if not self._differ:
                self._dimension = step // self._guard.every % 2
            numbers = torch.cat([numbers, self._replicas.digest(device, self._dimension)])
        self._compared = _Compared(step, numbers, own, read)

    def send(self) -> None:
        compared = self._compared
        if compared is not None and compared.wait is None:
            compared.wait = self._watch.exchange.sum_control(compared.numbers)

    def receive(self) -> None:
        compared = self._compared  # another thread can discard it meanwhile
        if compared is None or compared.wait is None:
            return
        try:
            compared.sums = compared.wait()
        except BaseException:
            self._compared = None
            raise

    def undo(self, names: Iterable[str]) -> None:
        self._watch.undo(names)

    def forget(self) -> None:
        self._watch.forget()

    def discard(self) -> None:
        self._compared = None
        self.forget()

    def change_ranks(self, exchange: Exchange) -> None:
        self.discard()
        self._differ = False  # a rank that joins does not know
        if self._unlocated is not None:
            # Ranks that join do not know that replicas differed, and cannot help to find them.
            judged, self._unlocated = self._unlocated, None
            self._publish(judged)
        self._watch.exchange = exchange

    def settle(self, step: int) -> frozenset[str]:
        self._judge()
        return frozenset(name for name, pause in self._pauses.items() if step < pause.until)

    def _judge(self) -> None:
        compared = self._compared
        if compared is None or compared.sums is None:
            return
        self._compared = None
        step, sums = compared.step, compared.sums
        measured = compared.read(sums[: compared.own])
        self._judged = _Judged(step, measured)
        judged = alarms(step, measured, self._watch.exchange.members)
        if self._guard.fall_back != "none":
            for alarm in judged:
                if alarm.kind in MENDED:
                    self._pause(alarm)
        replicas = self._replicas
        self._differ = replicas is not None and not replicas.are_equal(sums[compared.own :])
        if self._differ:
            self._unlocated = judged
        else:
            self._publish(judged)

    def _pause(self, alarm: Alarm) -> None:
        """Average uncompressed what an alarm is about."""
        names: Sequence[str] = alarm.parameters
        if self._guard.fall_back == "model" or not names:
            names = self._names
        for name in names:
            last, steps = self._pauses.get(name), self._guard.every
            if last is not None:
                # Negative in the pause, whose steps are not those of the method.
                ended = alarm.step - last.until
                if ended <= 0:
                    steps = last.steps
                elif ended <= 2 * self._guard.every:  # it has not recovered
                    steps = min(2 * last.steps, _LONGEST * self._guard.every)
            self._pauses[name] = Pause(alarm.step + steps, steps)

    def _publish(self, found: Sequence[Alarm]) -> None:
        """Report those that say more than the alarms of the last comparison."""
        known, self.alarms = self.alarms, tuple(found)
        new = [alarm for alarm in found if not any(map(alarm.is_part_of, known))]
        with ExitStack() as all_of_them:  # also after one that raises
            for alarm in reversed(new):
                all_of_them.callback(self._report, alarm)

    def _report(self, alarm: Alarm) -> None:
        if self._guard.callback is not None:
            self._guard.callback(alarm)
        elif self._watch.exchange.rank == 0:
            _log.warning("%s", alarm)

    def state_dict(self) -> dict[str, list[int]]:
        return {name: [pause.until, pause.steps] for name, pause in self._pauses.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[int]]) -> None:
        self.discard()
        self._unlocated, self._judged, self.alarms, self._differ = None, None, (), False
        self._pauses = {name: Pause(*pause) for name, pause in state.items()}
