"""Simulation: when a step ends whose backward pass, encoding and collectives overlap.

A rank has a thread of the backward pass, and a queue of what exchanges its buckets. The two share
the cores of the rank, or its device: a thread can use one core, a collective uses part of one. Each
gets a fair share: nobody gets more than it needs, and what one does not need goes to the other. All
ranks do the same at the same time, so one of them stands for all.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torchcomp.advisor.collectives import Times
from torchcomp.engine.bucket import BucketShape, Group
from torchcomp.specs.errors import SpecError

_NOTHING = 1e-12  # seconds that are rounding errors
_FORWARD, _OPTIMIZER = 0.3, 0.04  # shares of a step that is not measured in parts


@dataclass(frozen=True)
class Work:
    """Work of one thread, or of the device: it takes `seconds` if nothing else runs."""

    seconds: float


@dataclass(frozen=True)
class Call:
    """A collective of one of :data:`.KINDS`; its size is as in :mod:`.collectives`."""

    kind: str
    nbytes: int


Activity = Work | Call


@dataclass(frozen=True)
class Submitted:
    """What DDP's hook does with one of its buckets."""

    names: Group  # parameters of the bucket
    activities: tuple[Activity, ...]  # of the thread that exchanges, one after another
    work: float = 0.0  # seconds that the hook itself takes, in the thread of the backward pass


@dataclass(frozen=True)
class Recording:
    """The exchange of one step with a method, by DDP's buckets."""

    method: str
    buckets: tuple[Submitted, ...]

    def calls(self) -> list[Call]:
        """Return the collectives of a step."""
        activities = [each for bucket in self.buckets for each in bucket.activities]
        return [each for each in activities if isinstance(each, Call)]


@dataclass(frozen=True)
class Compute:
    """The work of a step without any exchange, in seconds of this rank's thread or device."""

    buckets: tuple[Group, ...]  # parameters of DDP's buckets, in the order in which these are ready
    ready: tuple[float, ...]  # when each bucket is ready, since the step began; ascending
    backward: float  # when the backward pass ends
    total: float  # when the step ends

    @classmethod
    def by_elements(cls, shapes: Sequence[BucketShape], seconds: float) -> "Compute":
        """Return a step whose buckets become ready by their share of the elements."""
        start, stop = _FORWARD * seconds, (1 - _OPTIMIZER) * seconds
        total = max(1, sum(shape.numel for shape in shapes))
        done = accumulate(shape.numel for shape in shapes)
        ready = tuple(min(stop, start + (stop - start) * each / total) for each in done)
        return cls(tuple(shape.names for shape in shapes), ready, stop, seconds)


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a step."""

    seconds: float  # of the whole step
    compute: float  # without any exchange

    @property
    def utilisation(self) -> float:
        """Share of the step that the computation would take alone."""
        return min(1.0, self.compute / self.seconds)


def simulate(
    recording: Recording,
    compute: Compute,
    times: Times,
    *,
    cores: float = 1.0,
    speedup: float = 1.0,
) -> StepTime:
    """Predict the time of a step.

    `times` are the collectives. `cores` are those of each rank: below 1 if ranks share them, 1 for
    a device. Ranks do the recorded work `speedup` times as fast as this one.
    """
    if tuple(bucket.names for bucket in recording.buckets) != compute.buckets:
        raise SpecError(
            f"the exchange of {recording.method} was recorded for other buckets than the "
            "computation was measured with: pass buckets=compute.buckets to record()"
        )

    def alone(activity: Activity) -> _Running:
        if isinstance(activity, Work):
            return _Running(activity.seconds / speedup, 1.0)
        seconds = times.seconds(activity.kind, activity.nbytes)
        if seconds <= 0:  # among one rank
            return _Running(0.0, 0.0)
        # Measured alone, so no more of the core than there is.
        return _Running(seconds, min(cores, times.cpu(activity.kind, activity.nbytes) / seconds))

    queue: deque[_Running] = deque()
    clock = done = 0.0
    for bucket, ready in zip(recording.buckets, compute.ready, strict=True):
        clock += _computed(ready - done + bucket.work / speedup, queue, cores)
        done = ready
        queue.extend(map(alone, bucket.activities))
    clock += _computed(compute.backward - done, queue, cores)
    clock += sum(each.left * max(1.0, each.core / cores) for each in queue)
    # The optimizer's step follows, alone.
    share = min(1.0, cores)
    return StepTime(clock + (compute.total - compute.backward) / share, compute.total / share)


def simulate_alone(
    recording: Recording, times: Times, *, cores: float = 1.0, speedup: float = 1.0
) -> float:
    """Predict the seconds of an exchange that nothing overlaps, such as that of local steps."""
    names = tuple(bucket.names for bucket in recording.buckets)
    nothing = Compute(names, (0.0,) * len(names), 0.0, 0.0)
    return simulate(recording, nothing, times, cores=cores, speedup=speedup).seconds


@dataclass
class _Running:
    """An activity that runs, or waits in the queue."""

    left: float  # seconds that it still takes at full speed
    core: float  # share of a core that it uses at full speed


def _computed(work: float, queue: deque[_Running], cores: float) -> float:
    """Return the seconds that `work` of the backward pass takes while the queue goes on."""
    clock = 0.0
    while work > _NOTHING:
        if not queue:
            return clock + work / min(1.0, cores)
        other = queue[0]
        # Each gets half of the cores, or what the other one does not need.
        speed, speed_of_other = min(1.0, cores - other.core), 1.0
        if other.core > cores / 2:
            speed, speed_of_other = cores / 2, cores / 2 / other.core
        passed = min(work / speed, other.left / speed_of_other)
        clock += passed
        work -= passed * speed
        other.left -= passed * speed_of_other
        if other.left <= _NOTHING:
            queue.popleft()
    return clock
