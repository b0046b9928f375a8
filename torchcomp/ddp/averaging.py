"""Buckets: what happens to DDP's buckets between the hook and the optimizer, and in which thread.

The hook submits every bucket. :class:`Flat` averages it over all ranks; :class:`.TwoLevel` averages
it within each node first.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from torch import Tensor

from torchcomp.averager import Averager
from torchcomp.bucket import Bucket, BucketShape, Names
from torchcomp.checkpoint import layout_of
from torchcomp.ddp.reordering import Reordering
from torchcomp.errors import ON_ALL_RANKS
from torchcomp.exchange import Exchange
from torchcomp.hooks.averaging import Averaging
from torchcomp.hooks.executors import Executor, Job
from torchcomp.redistribution import Place


class Step(Protocol):
    """The step that a backward pass takes: what its owner does around the average."""

    def begin(self) -> tuple[float, dict[str, float] | None]:
        """Return the loss scale and the learning rates of the step, in the user's thread."""

    def before(self, bucket: Bucket) -> None:
        """Look at a bucket before it is averaged."""

    def finish(self, dense_bytes: int | None = None, leaving: bool | None = None) -> bool:
        """End the step, after its last bucket; see :meth:`.Averager.finish`."""

    def complete(self) -> None:
        """Pass the averaged buckets on, or those of a step that failed."""


class Lane:
    """Runs jobs on an executor, in the order of submission, until one of them raises.

    Args:
        executor: where the jobs run.
        leave: called with an error that other ranks may not have, and who would wait for this one.

    Attributes:
        failure: the exception of that job, or None.
    """

    def __init__(self, executor: Executor, leave: Callable[[BaseException], None]) -> None:
        self._executor, self._leave = executor, leave
        self.failure: BaseException | None = None
        self.join, self.close = executor.join, executor.close

    def submit(self, job: Job, *, always: bool = False) -> None:
        """Run `job` after all earlier ones; if one of them failed, only with `always`."""
        self._executor.submit(partial(self._run, job, always))

    def _run(self, job: Job, always: bool) -> None:
        if self.failure is None or always:
            try:
                job()
            except BaseException as error:
                # The owner raises it at the end of the backward pass. Through the future, DDP
                # would report it as "Unable to cast <message> to Tensor". SystemExit as well: it
                # would end the executor's thread, for which the backward pass then waits for ever.
                self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Let no further job run, because of this error."""
        self.failure = self.failure or error
        if not isinstance(error, ON_ALL_RANKS):
            self._leave(error)


class Buckets(Averaging, ABC):
    """Averages DDP's buckets, one backward pass after another.

    Args:
        averager: the engine.
        everyone: exchange among all ranks over the user's group, for between two steps.
        place: where this rank is.
        parameters: of the model, by name.
        lanes: where jobs run, from the first to the last that a bucket passes.

    Attributes:
        parameters: of the model, by name.
        lanes: where jobs run.
    """

    def __init__(
        self,
        averager: Averager,
        everyone: Exchange,
        place: Place,
        parameters: Mapping[str, Tensor],
        *lanes: Lane,
    ) -> None:
        super().__init__(averager, everyone, place, layout_of(parameters))
        self.parameters = parameters
        self.lanes = lanes
        self._shapes: dict[Names, BucketShape] = {}

    def shape_of(self, names: Names) -> BucketShape:
        """Return the shape of a bucket of these parameters."""
        shape = self._shapes.get(names)
        if shape is None:
            shape = self._shapes[names] = BucketShape.of(names, self.parameters)
        return shape

    def _values_of(self, step: Step) -> tuple[float, dict[str, float] | None]:
        """Return the loss scale and the learning rates of a step that begins."""
        try:
            return step.begin()
        except Exception as error:
            # Kept, as that of a job: raised here, it would leave DDP in the middle of a step.
            self.lanes[0].fail(error)
            return 1.0, None

    @abstractmethod
    def submit(self, bucket: Bucket, step: Step, *, first: bool, last: bool) -> None:
        """Average a bucket of DDP in place, and end the step after its last bucket.

        This returns at once. An exception is kept in :attr:`failure`.
        """

    @abstractmethod
    def beside(self, averager: Averager) -> "Buckets":
        """Return others that average with another averager, in the same lanes.

        The steps of both must not overlap.

        Args:
            averager: for the exchange, the parameters and the groups of this one's averager.
        """

    def start(self) -> None:
        """Forget the failure of an earlier step."""
        for lane in self.lanes:
            lane.failure = None

    def abandon(self, step: int) -> None:
        # Jobs that have not begun will not run. One that waits for other ranks is not waited for.
        for lane in self.lanes:
            lane.failure = lane.failure or RuntimeError("the backward pass raised")
        super().abandon(step)

    @property
    def failure(self) -> BaseException | None:
        """The first exception of the step, or None."""
        return next((lane.failure for lane in self.lanes if lane.failure is not None), None)

    def join(self) -> None:
        for lane in self.lanes:
            lane.join()

    def close(self, timeout: float | None = None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        # The last lane first: each waits for the stream of the one before it.
        for lane in reversed(self.lanes):
            lane.close(None if end is None else max(0.0, end - time.monotonic()))
        super().close(timeout)


class Flat(Buckets):
    """Averages every bucket over all ranks at once."""

    def __init__(self, averager: Averager, everyone: Exchange, lane: Lane) -> None:
        place = Place.in_order(everyone.rank)
        super().__init__(averager, everyone, place, averager.parameters, lane)
        self._reordering = Reordering(None)
        # What it was made for: whether the method is grouped, and the groups.
        self._reordered: tuple[bool, tuple[Names, ...]] | None = None

    def submit(self, bucket: Bucket, step: Step, *, first: bool, last: bool) -> None:
        (lane,) = self.lanes
        begin = partial(self._begin, *self._values_of(step)) if first else None
        lane.submit(partial(self._average, bucket, step, begin, last))
        if last:
            lane.submit(step.complete, always=True)

    def beside(self, averager: Averager) -> "Flat":
        return Flat(averager, self.everyone, *self.lanes)

    def _begin(self, scale: float, lrs: dict[str, float] | None) -> None:
        averager = self.averager
        averager.begin(scale, lrs)
        # A swap or a loaded checkpoint changes the groups.
        wanted = (averager.grouped, averager.buckets)
        if wanted != self._reordered:
            self._reordering = self._reorder([averager.shape_of(g) for g in averager.buckets])
            self._reordered = wanted
        self._reordering.begin()

    def _reorder(self, groups: list[BucketShape]) -> Reordering:
        """Return what yields these groups, or DDP's buckets if the result is the same."""
        return Reordering(groups if self.averager.grouped else None)

    def _average(
        self, bucket: Bucket, step: Step, begin: Callable[[], None] | None, last: bool
    ) -> None:
        # One job for all of it: on the CPU, a job is a hand-over between threads.
        if begin is not None:
            begin()
        step.before(bucket)
        for group in self._reordering.add(bucket):
            self.averager.average(group)
        if last:
            self._finish(step)

    def _finish(self, step: Step) -> bool:
        return step.finish()
