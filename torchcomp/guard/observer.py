"""GuardObserver: watches the steps of an averager, compares every few, and says what is wrong.

1. `before` and `after` a bucket, and in `finishing`: measure. An error then fails the step on all
   ranks, because the concluding message follows.
2. `finished`: send the sums of a comparison. The message travels until the next step begins.
3. `settle`: receive and judge them.
4. `begin`: if replicas differ, find out which. That takes a message more.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from torchcomp.aggregators import Aggregator
from torchcomp.averager import Averager
from torchcomp.bucket import Bucket
from torchcomp.guard.alarms import Alarm, alarms, replica_alarm
from torchcomp.guard.options import Guard
from torchcomp.guard.replicas import Replicas
from torchcomp.guard.report import Report
from torchcomp.guard.watch import Found, Watch
from torchcomp.kernels import follow

_log = logging.getLogger(__name__)


@dataclass
class _Compared:
    """A comparison that is not yet judged.

    Attributes:
        step: number of steps that had finished, with its own.
        numbers: what the ranks add up.
        own: how many of them are from the steps. The others are from the replicas.
        read: reads those.
        wait: waits for the sums over the ranks; None before they are sent.
    """

    step: int
    numbers: Tensor
    own: int
    read: Callable[[Tensor], Found]
    wait: Callable[[], Tensor] | None = None


@dataclass(frozen=True)
class _Judged:
    """A comparison that was judged, after `step` steps."""

    step: int
    found: Found

    @cached_property
    def report(self) -> Report:
        """The ratios, made when they are asked for: they are more work than judging the sums."""
        return self.found.report(self.step)


class GuardObserver:
    """The observer of an averager with a guard.

    Args:
        averager: what it watches.
        guard: the options.
        replicas: compares the parameters, if they are known.

    Attributes:
        alarms: what the last comparison found wrong.

    Raises:
        SpecError: if the method's law is not about its slots.
    """

    def __init__(self, averager: Averager, guard: Guard, replicas: Replicas | None = None) -> None:
        self._averager, self._guard, self._replicas = averager, guard, replicas
        self.alarms: tuple[Alarm, ...] = ()
        self._watch = Watch(averager, guard.every, guard.age)
        self._exchange = averager.exchange  # of the last step
        self._compared: _Compared | None = None
        # What replicas are compared by, and whether they differed in it: it is then kept.
        self._dimension, self._differ = 0, False
        self._judged: _Judged | None = None  # the last comparison
        # Alarms of a comparison after which it is not known yet which replicas differ.
        self._unlocated: Sequence[Alarm] | None = None
        for group in averager.buckets:
            # All stages have the same slots.
            self._watch.check(averager.aggregator.at(0), averager.shape_of(group))
        for device in {parameter.device for parameter in averager.parameters.values()}:
            follow.rehearse(device)

    @property
    def report(self) -> Report | None:
        """The last comparison, or None before the first one."""
        judged = self._judged  # another thread can end a comparison meanwhile
        return None if judged is None else judged.report

    def begin(self, ratios: Mapping[str, float]) -> None:
        self._compared = None  # of a step that did not end
        if self._exchange is not self._averager.exchange:
            self._change_ranks()
        self._find_diverged_replicas()
        self._watch.begin(ratios)

    def _change_ranks(self) -> None:
        self.changed()
        self._exchange, self._differ = self._averager.exchange, False
        if self._unlocated is not None:
            # Ranks that join do not know that replicas differed, and cannot help to find them.
            judged, self._unlocated = self._unlocated, None
            self._publish(judged)

    def _find_diverged_replicas(self) -> None:
        """Find out which parameters of the replicas differ, if any do. All ranks call this."""
        if self._unlocated is None or self._judged is None or self._replicas is None:
            return
        judged, self._unlocated = self._unlocated, None
        found = self._replicas.differing(self._exchange)
        self._publish([*judged, *([replica_alarm(self._judged.step, found)] if found else [])])

    def before(self, bucket: Bucket, method: Aggregator) -> None:
        self._watch.before(bucket, method)

    def after(self, bucket: Bucket, method: Aggregator) -> None:
        self._watch.after(bucket, method)

    def finishing(self) -> None:
        measured = self._watch.finish()
        if measured is None:
            return
        numbers, read = measured
        step, own = self._averager.step + 1, numbers.numel()
        if self._replicas is not None:
            if not self._differ:
                self._dimension = step // self._guard.every % 2
            digest = self._replicas.digest(self._exchange.device, self._dimension)
            numbers = torch.cat([numbers, digest])
        self._compared = _Compared(step, numbers, own, read)

    def finished(self, counts: bool, unchanged: Collection[str]) -> None:
        if not counts:
            self._compared = None
            self._watch.forget()
            return
        if unchanged:
            self._watch.undo(unchanged)
        if self._compared is not None:
            self._compared.wait = self._exchange.sum_control(self._compared.numbers)

    def changed(self) -> None:
        # One that is not sent yet is of the step that is about to end.
        if self._compared is not None and self._compared.wait is not None:
            self._compared = None
        self._watch.forget()

    def settle(self) -> None:
        compared = self._compared
        if compared is None or compared.wait is None:
            return
        try:
            sums = compared.wait()
        finally:
            discarded, self._compared = self._compared is not compared, None
        # Another thread can have taken the step back meanwhile.
        if not discarded and self._averager.step == compared.step:
            self._judge(compared, sums)

    def _judge(self, compared: _Compared, sums: Tensor) -> None:
        self._judged = _Judged(compared.step, compared.read(sums[: compared.own]))
        judged = alarms(compared.step, self._judged.found, self._exchange.members)
        replicas = self._replicas
        self._differ = replicas is not None and not replicas.are_equal(sums[compared.own :])
        if self._differ:
            self._unlocated = judged
        else:
            self._publish(judged)

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
        elif self._exchange.rank == 0:
            _log.warning("%s", alarm)


def watch(
    averager: Averager,
    guard: Guard | bool = True,
    replicas: Mapping[str, Tensor] | Replicas | None = None,
) -> GuardObserver:
    """Watch the steps of an averager. All ranks make the same call, before the first step.

    Args:
        averager: of a loop of your own. For a model, pass ``guard=`` to :func:`torchcomp.register`.
        guard: the options. True stands for those by default.
        replicas: parameters that are equal on all ranks, by name, to be compared as well.

    Returns:
        The guard: its last `report`, None before the first one, and what it found, `alarms`.

    Raises:
        SpecError: if the method's law is not about its slots.
    """
    options = Guard.of(guard) or Guard()
    if isinstance(replicas, Mapping):
        replicas = Replicas(replicas)
    averager.observer = observer = GuardObserver(averager, options, replicas)
    return observer
