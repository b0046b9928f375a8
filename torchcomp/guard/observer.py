"""GuardObserver: watches the steps of an averager, compares every few, and says what is wrong.

`before`, `after` and `finishing` measure, `finished` sends the sums, `begin` compares the replicas,
and `settle` receives, judges and tells.
"""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchcomp.aggregators import Aggregator, planned_traffic
from torchcomp.engine.averager import Averager
from torchcomp.engine.bucket import Bucket, BucketShape
from torchcomp.engine.observer import Observer
from torchcomp.engine.profiling import span
from torchcomp.guard.replicas import Replicas
from torchcomp.guard.report import Alarm, Compared, Report, alarms, replica_alarm
from torchcomp.guard.watch import SCALARS, BucketWatch
from torchcomp.specs.checks import check_count
from torchcomp.specs.errors import SpecError

_log = logging.getLogger(__name__)

_WIDTHS = 11, 251  # smallest and largest number of columns of a sketch
_SHARE = 0.008  # of the method's bytes, which more columns than the smallest may take
# Step of a comparison, what waits for its sums, what has measured it, and sizes of its parts.
_Sent = tuple[int, Callable[[], Tensor], Sequence[BucketWatch], list[int]]


@dataclass(frozen=True, kw_only=True)
class Guard:
    """When :func:`torchcomp.register` checks what it applies, and whom it tells.

    Every `every` steps, the ranks compare the mean that the method applies with the dense mean of
    the same gradients, and the parameters of the replicas with each other. docs/guard.md explains
    what is measured and when there is an alarm.

    Attributes:
        every: number of steps from one comparison to the next.
        age: number of steps after which a value that waits in the residual counts as old.
        callback: called on every rank with each new :class:`Alarm`, between two steps. It may call
            ``handle.swap(spec)``, on all ranks alike: the step that begins next has the new method.
            By default, rank 0 logs the alarm as a warning.
    """

    every: int = 50
    age: int = 50
    # Each rank has its own, so ranks are compared without it.
    callback: Callable[[Alarm], object] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_count("every", self.every, owner="Guard")
        check_count("age", self.age, owner="Guard")
        if self.callback is not None and not callable(self.callback):
            problem = f"Guard: callback must be a function of one alarm, not {self.callback!r}"
            raise SpecError(problem, "callback")

    @classmethod
    def of(cls, value: Any) -> "Guard":
        """Return the guard that an argument stands for: True or a Guard."""
        if value is True:
            return cls()
        if isinstance(value, cls):
            return value
        raise SpecError(f"guard must be True, False or a torchcomp.Guard, not {value!r}", "guard")


class GuardObserver(Observer):
    """The observer of an averager with a guard.

    Attributes:
        report: the last comparison, or None before the first one.
        alarms: what it found wrong.
    """

    def __init__(self, averager: Averager, guard: Guard, replicas: Replicas | None = None) -> None:
        self._averager, self._guard, self._replicas = averager, guard, replicas
        self.report: Report | None = None
        self.alarms: tuple[Alarm, ...] = ()
        self._exchange = averager.exchange  # of the last step
        self._watches: dict[BucketShape, BucketWatch] = {}
        self._ratios: Mapping[str, float] = {}
        self._step, self._width = 0, _WIDTHS[0]  # of this step: its number, the sketches' columns
        self._number: int | None = None  # of the comparison that this step makes
        # What was measured of this step's buckets; what the ranks add up; what is on its way.
        self._rows: list[tuple[BucketWatch, Tensor, Tensor, Tensor]] = []
        self._numbers: list[Tensor] = []
        self._sent: _Sent | None = None
        self._found: Sequence[Alarm] = ()  # by the last comparison, and of the replicas:
        self._diverged: Sequence[Alarm] = ()
        method = averager.aggregator.at(0)  # all stages have the same slots
        for shape in map(averager.shape_of, averager.buckets):
            if shape.numel:
                self._watch_of(shape, method, averager.parameters[shape.names[0]])

    def begin(self, ratios: Mapping[str, float]) -> None:
        self._ratios, self._rows, self._numbers = ratios, [], []
        if self._exchange is not self._averager.exchange:
            self.changed()  # and a rank that joins knows of no alarm
            self._exchange = self._averager.exchange
            self.alarms = self._found = self._diverged = ()
        self._step = self._averager.step + 1
        if self._averager.step % self._guard.every == 0 and self._replicas is not None:
            differing = self._replicas.differing(self._exchange)
            self._diverged = [replica_alarm(self._averager.step, differing)] if differing else ()
        number, left = divmod(self._step, self._guard.every)
        self._number = None if left else number
        if self._number is not None:
            self._width = self._affordable_width()

    def _affordable_width(self) -> int:
        averager = self._averager
        shapes = [*map(averager.shape_of, averager.buckets)]
        sent = planned_traffic(averager.aggregator, shapes, self._exchange.world_size).sent
        # Numbers of 4 bytes, per parameter. An all-reduce sends nearly twice its size.
        affordable = _SHARE * sent * self._guard.every / (len(averager.parameters) * 4 * 2)
        least, most = _WIDTHS
        return max(least, min(most, math.floor((affordable - SCALARS) / 2)))

    def _watch_of(self, shape: BucketShape, method: Aggregator, like: Tensor) -> BucketWatch:
        known = self._watches.get(shape)
        if known is None or known.method is not method:
            known = BucketWatch(self._averager, method, shape, like, self._guard.age)
            self._watches[shape] = known
        return known

    def before(self, bucket: Bucket, method: Aggregator) -> None:
        if bucket.shape.numel:
            self._watch_of(bucket.shape, method, bucket.flat).before(bucket.flat, self._number)

    @span("guard")
    def after(self, bucket: Bucket, method: Aggregator) -> None:
        if bucket.shape.numel:
            watch = self._watch_of(bucket.shape, method, bucket.flat)
            measured = watch.after(bucket.flat, self._ratios, self._width)
            if measured is not None:
                self._rows.append((watch, *measured))

    def finishing(self) -> None:
        if not self._rows:
            return
        exchange, device = self._exchange, self._exchange.device
        columns = list(zip(*self._rows, strict=True))[1:]
        rows, gradients, messages = ([each.to(device) for each in column] for column in columns)
        # The last columns of a bucket's rows are counts of this rank.
        counts = sum(each[:, -2:].sum(0) for each in rows)
        by_rank = torch.zeros(4, exchange.world_size, device=device)
        by_rank[:, exchange.rank].copy_(torch.stack([sum(gradients), sum(messages), *counts]))
        self._numbers = [*(each.flatten() for each in rows), by_rank.flatten()]

    def finished(self, counts: bool, unchanged: Collection[str]) -> None:
        if not counts:
            self.changed()
            return
        for watch in self._watches.values():
            if unchanged and watch.samples is not None:
                watch.samples.undo(unchanged)
        if self._numbers:
            wait = self._exchange.sum_control(torch.cat(self._numbers))
            numels = [each.numel() for each in self._numbers]
            watches = [watch for watch, *_ in self._rows]
            self._sent = self._step, wait, watches, numels

    def changed(self) -> None:
        self._watches, self._sent = {}, None  # another thread can read the old ones

    def settle(self) -> None:
        if self._sent is not None:
            self._receive(self._sent)
        known, self.alarms = self.alarms, (*self._found, *self._diverged)
        new = [alarm for alarm in self.alarms if not any(map(alarm.is_part_of, known))]
        if not new:
            return
        with self._averager.tell(), ExitStack() as all_of_them:  # also after one that raises
            for alarm in reversed(new):
                all_of_them.callback(self._report, alarm)

    def _receive(self, sent: _Sent) -> None:
        step, wait, watches, numels = sent
        try:
            received = wait()
        finally:
            discarded, self._sent = self._sent is not sent, None
        # Another thread can have taken the step back meanwhile.
        if not discarded and self._averager.step == step:
            self._judge(step, watches, torch.split(received, numels))

    def _judge(self, step: int, watches: Sequence[BucketWatch], parts: Sequence[Tensor]) -> None:
        parameters = dict[str, Compared]()
        for watch, rows in zip(watches, parts[:-1], strict=True):
            parameters |= watch.read(rows, self._width)
        by_rank = parts[-1].view(4, -1).double()
        gradients, messages, changed, starved = map(tuple, by_rank.tolist())
        self.report = Report(
            step,
            Compared.total(parameters.values()),
            parameters,
            tuple(map(math.sqrt, gradients)),
            tuple(map(math.sqrt, messages)),
            changed,
            starved,
            1 / math.sqrt(2 * self._width),
            self._guard.age,
            [law for watch in watches for law in watch.laws],
        )
        self._found = alarms(self.report, self._exchange.members)

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
    """Watch the steps of an averager. All ranks call this alike, before the first step.

    Args:
        averager: of a loop of your own. For a model, pass ``guard=`` to :func:`torchcomp.register`.
        guard: the options. True stands for those by default.
        replicas: parameters that are equal on all ranks, by name, to be compared as well.

    Returns:
        The guard: its last `report`, None before the first one, and what it found, `alarms`.

    Raises:
        SpecError: if the method's law is not about its slots.
    """
    compared = Replicas(replicas) if isinstance(replicas, Mapping) else replicas
    observer = GuardObserver(averager, Guard.of(guard), compared)
    averager.observers = (observer,)
    return observer
