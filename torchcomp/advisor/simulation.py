"""Simulation: when a step ends whose backward pass, encoding and collectives overlap.

A rank has a thread of the backward pass and lanes that exchange its buckets, each a queue. What
runs at the same time shares two resources:

- the cores of the rank, or its device. A thread can use one core; a collective uses part of one;
- its link. A collective uses it in the part of its time that grows with the size of the message.

Each is shared fairly: nobody gets more than it needs, and what one does not need goes to the
others. All ranks do the same at the same time, so one of them stands for all.
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
    inside: bool = False  # whether it is among the ranks of a node


Activity = Work | Call
Job = tuple[tuple[Activity, ...], ...]
"""What happens to a group of gradients, lane after lane. Each lane does its jobs in order."""


@dataclass(frozen=True)
class Submitted:
    """What DDP's hook does with one of its buckets."""

    names: Group  # parameters of the bucket
    jobs: tuple[Job, ...]
    work: float = 0.0  # seconds that the hook itself takes, in the thread of the backward pass


@dataclass(frozen=True)
class Recording:
    """The exchange of one step with a method, by DDP's buckets."""

    method: str
    buckets: tuple[Submitted, ...]

    def calls(self, *, inside: bool = False) -> list[Call]:
        """Return the collectives of a step among all ranks, or those inside a node."""
        activities = [a for b in self.buckets for job in b.jobs for lane in job for a in lane]
        return [a for a in activities if isinstance(a, Call) and a.inside == inside]


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
    inside: Times | None = None,
    *,
    cores: float = 1.0,
    speedup: float = 1.0,
) -> StepTime:
    """Predict the time of a step.

    `times` are the collectives among all ranks; with two levels, those among ranks of equal place,
    and `inside` those of a node. `cores` are those of each rank: below 1 if ranks share them, 1 for
    a device. Ranks do the recorded work `speedup` times as fast as this one.
    """
    if tuple(bucket.names for bucket in recording.buckets) != compute.buckets:
        raise SpecError(
            f"the exchange of {recording.method} was recorded for other buckets than the "
            "computation was measured with: pass buckets=compute.buckets to record()"
        )
    machine = _Machine((times, inside), cores, speedup)
    done = 0.0
    for bucket, ready in zip(recording.buckets, compute.ready, strict=True):
        machine.compute(ready - done + bucket.work / speedup)
        done = ready
        for job in bucket.jobs:
            machine.submit(job)
    machine.compute(compute.backward - done)
    clock = machine.finish()
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
    """An activity that runs."""

    left: float  # seconds that it still takes at full speed
    core: float  # share of a core that it uses at full speed
    link: float = 0.0  # share of the link
    place: int = 0  # index of the link


def _fair(demands: Sequence[float], capacity: float) -> list[float]:
    """Share a resource; return which part of its demand each one gets."""
    left, level = capacity, 0.0
    for waiting, demand in zip(range(len(demands), 0, -1), sorted(demands), strict=True):
        level = left / waiting
        if demand > level:
            break
        left -= demand
    else:
        return [1.0] * len(demands)
    return [1.0 if demand <= level else level / demand for demand in demands]


class _Lane:
    """A queue of jobs, which run one after another."""

    def __init__(self) -> None:
        self.queue: deque[Job] = deque()
        self.job: Job = ()
        self.running: _Running | None = None
        self.rest: deque[Activity] = deque()


class _Machine:
    """One rank: what runs in its lanes while it computes, and how fast."""

    def __init__(self, links: Sequence[Times | None], cores: float, speedup: float) -> None:
        self._links, self._cores, self._speedup = links, cores, speedup
        self._lanes: list[_Lane] = []
        self._clock = 0.0

    def submit(self, job: Job) -> None:
        while len(self._lanes) < len(job):
            self._lanes.append(_Lane())
        self._lanes[0].queue.append(job)

    def compute(self, seconds: float) -> None:
        """Compute for so much work, while the lanes go on."""
        mine = _Running(seconds, 1.0)
        while mine.left > _NOTHING:
            self._advance(mine)

    def finish(self) -> float:
        """Wait for the lanes; return the time."""
        while self._advance(None):
            pass
        return self._clock

    def _start(self, activity: Activity) -> _Running:
        """Return what an activity takes alone."""
        if isinstance(activity, Work):
            return _Running(activity.seconds / self._speedup, 1.0)
        times = self._links[activity.inside]
        if times is None:
            raise SpecError("an exchange in two levels needs `inside`, the times inside a node")
        seconds = times.seconds(activity.kind, activity.nbytes)
        if seconds <= 0:  # among one rank
            return _Running(0.0, 0.0)
        # Measured alone, so no more of the core than there is.
        core = min(self._cores, times.cpu(activity.kind, activity.nbytes) / seconds)
        latency = min(seconds, times.seconds(activity.kind, 0))
        return _Running(seconds, core, 1 - latency / seconds, int(activity.inside))

    def _speeds(self, running: Sequence[_Running]) -> list[float]:
        """Return how fast each activity is beside the others, from 0 to 1."""
        speeds = _fair([each.core for each in running], self._cores)
        for place in range(len(self._links)):
            on = [each.link if each.place == place else 0.0 for each in running]
            speeds = [min(pair) for pair in zip(speeds, _fair(on, 1.0), strict=True)]
        return speeds

    def _advance(self, mine: _Running | None) -> bool:
        """Go on to the next end of an activity; return whether anything ran."""
        self._start_jobs()
        running = [lane.running for lane in self._lanes if lane.running is not None]
        running += [] if mine is None else [mine]
        if not running:
            return False
        speeds = self._speeds(running)
        passed = min(r.left / speed for r, speed in zip(running, speeds, strict=True))
        self._clock += passed
        for each, speed in zip(running, speeds, strict=True):
            each.left -= passed * speed
        self._end_activities()
        return True

    def _start_jobs(self) -> None:
        for number, lane in enumerate(self._lanes):
            if lane.running is None and lane.queue:
                lane.job = lane.queue.popleft()
                # Every job has an activity in each of its lanes, if only of 0 seconds.
                first, *rest = lane.job[number]
                lane.running, lane.rest = self._start(first), deque(rest)

    def _end_activities(self) -> None:
        for number, lane in enumerate(self._lanes):
            if lane.running is None or lane.running.left > _NOTHING:
                continue
            if lane.rest:
                lane.running = self._start(lane.rest.popleft())
                continue
            lane.running = None
            if number + 1 < len(lane.job):
                self._lanes[number + 1].queue.append(lane.job)
