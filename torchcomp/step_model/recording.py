"""Recording: what the exchange of a step consists of, without the ranks that it is made for.

A method runs on this rank alone, over an exchange that pretends to have any number of ranks: it
notes each collective with its size, and the work of this rank before it. What the other ranks would
send is a copy of what this rank sends. One mechanism therefore covers every method and every route.
"""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchcomp.aggregators import Aggregator, Bidirectional
from torchcomp.averager import Averager
from torchcomp.bucket import Bucket, BucketShape, Group
from torchcomp.checks import check_count, check_positive
from torchcomp.component import Component
from torchcomp.compressors.sparse import Sparsifier
from torchcomp.ddp.reordering import Reordering
from torchcomp.ddp.two_level import Completed
from torchcomp.errors import SpecError
from torchcomp.exchange import Exchange
from torchcomp.means import exact_mean
from torchcomp.nodes import check_divides
from torchcomp.pieces import Pieces
from torchcomp.spec import parse_aggregator
from torchcomp.step_model.collectives import ALL_GATHER, ALL_REDUCE, ALL_REDUCE_BF16, ALL_TO_ALL


@dataclass(frozen=True)
class Work:
    """Work of one thread, or of the device: it takes `seconds` if nothing else runs."""

    seconds: float


@dataclass(frozen=True)
class Call:
    """A collective.

    Attributes:
        kind: one of :data:`.KINDS`.
        nbytes: size of its message, as in :mod:`.collectives`.
        inside: whether it is among the ranks of a node.
    """

    kind: str
    nbytes: int
    inside: bool = False


Activity = Work | Call
MOST_RANKS = 1024
"""Most ranks that one can stand for: it decodes the messages of all of them."""

_COPIED_BYTES = 2**28
_CACHE_BYTES = 2**25

Job = tuple[tuple[Activity, ...], ...]
"""What happens to a group of gradients, lane after lane. Each lane does its jobs in order."""


@dataclass(frozen=True)
class Submitted:
    """What DDP's hook does with one of its buckets.

    Attributes:
        names: parameters of the bucket.
        jobs: what it submits.
        work: seconds that the hook itself takes, in the thread of the backward pass.
    """

    names: Group
    jobs: tuple[Job, ...]
    work: float = 0.0


@dataclass(frozen=True)
class Recording:
    """The exchange of one step.

    Attributes:
        method: its name.
        buckets: by DDP's buckets, in the order in which they become ready.
    """

    method: str
    buckets: tuple[Submitted, ...]

    def calls(self, *, inside: bool = False) -> list[Call]:
        """Return the collectives of a step among all ranks, or those inside a node."""
        activities = [a for b in self.buckets for job in b.jobs for lane in job for a in lane]
        return [a for a in activities if isinstance(a, Call) and a.inside == inside]

    def scaled(self, speedup: float) -> "Recording":
        """Return the exchange of ranks that work `speedup` times as fast as this one."""
        check_positive("speedup", speedup)

        def scale(activity: Activity) -> Activity:
            return Work(activity.seconds / speedup) if isinstance(activity, Work) else activity

        buckets = tuple(
            Submitted(
                bucket.names,
                tuple(tuple(tuple(map(scale, lane)) for lane in job) for job in bucket.jobs),
                bucket.work / speedup,
            )
            for bucket in self.buckets
        )
        return Recording(self.method, buckets)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings and lists, for JSON."""
        buckets = [
            {
                "names": list(bucket.names),
                "work": bucket.work,
                "jobs": [[[_plain(each) for each in lane] for lane in job] for job in bucket.jobs],
            }
            for bucket in self.buckets
        ]
        return {"method": self.method, "buckets": buckets}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Recording":
        """Return what :meth:`to_dict` was called on."""
        buckets = tuple(
            Submitted(
                tuple(bucket["names"]),
                tuple(
                    tuple(tuple(_activity(each) for each in lane) for lane in job)
                    for job in bucket["jobs"]
                ),
                bucket["work"],
            )
            for bucket in values["buckets"]
        )
        return cls(values["method"], buckets)


def _plain(activity: Activity) -> list[Any]:
    if isinstance(activity, Work):
        return [activity.seconds]
    return [activity.kind, activity.nbytes, activity.inside]


def _activity(plain: Sequence[Any]) -> Activity:
    return Work(*plain) if len(plain) == 1 else Call(*plain)


_Taken = list[list[list[list[Activity]]]]
"""The activities of a step, by bucket, job and lane."""


class RecordingExchange(Exchange):
    """The exchange of rank 0 of `world_size` ranks that are not there.

    Args:
        world_size: number of ranks.
        device: device of the gradients.
        inside: whether these are the ranks of a node.
    """

    def __init__(self, world_size: int, device: torch.device, *, inside: bool = False) -> None:
        super().__init__(0, world_size, device)
        self._inside = inside
        self._tape = _Tape(device)

    @contextmanager
    def recorded(self, onto: list[Activity]) -> Iterator[None]:
        """Append the activities of the block to `onto`."""
        self._tape.start(onto)
        yield
        self._tape.end()

    def receive(
        self, senders: Sequence[int], frames: Sequence[Tensor], lengths: Sequence[int]
    ) -> list[Tensor]:
        messages = super().receive(senders, frames, lengths)
        # A copy of this rank's message can have another length than the message that it stands for.
        self._found.clear()
        return messages

    def gather_objects(self, value: Any, dst: int | None = None) -> list[Any]:
        return [value] * self.world_size

    def _all_reduce(self, values: Tensor) -> None:
        narrow = values.dtype in (torch.bfloat16, torch.float16)
        self._note(ALL_REDUCE_BF16 if narrow else ALL_REDUCE, values.nbytes)
        self._tape.resume()

    def _all_gather(self, mine: Tensor) -> Tensor:
        self._note(ALL_GATHER, mine.nbytes)
        # Many large messages share their memory, which one rank may not have for all of them.
        gathered = mine.expand(self.world_size, -1)
        if gathered.nbytes <= _COPIED_BYTES:
            gathered = gathered.contiguous()
        self._tape.resume()
        return gathered

    def _all_to_all(
        self, outgoing: Tensor, sizes: Sequence[int], arriving: Sequence[int]
    ) -> Tensor:
        self._note(ALL_TO_ALL, outgoing.element_size() * (sum(sizes) - sizes[0]))
        mine = outgoing[: sizes[0]]
        received = torch.cat([_resized(mine, size) for size in arriving])
        self._tape.resume()
        return received

    def _note(self, kind: str, nbytes: int) -> None:
        self._tape.note(Call(kind, nbytes, self._inside))


class _Tape:
    """Collects collectives, and the work between them.

    A block of one exchange can run inside that of another; each has a tape.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._activities: list[Activity] | None = None
        self._since = 0.0

    def start(self, onto: list[Activity]) -> None:
        self._activities = onto
        self.resume()

    def note(self, call: Call) -> None:
        if self._activities is not None:
            self._activities += [Work(self._now() - self._since), call]

    def resume(self) -> None:
        self._since = self._now()

    def end(self) -> None:
        if self._activities is not None:
            self._activities.append(Work(self._now() - self._since))
        self._activities = None

    def _now(self) -> float:
        """Return the seconds that this thread has worked, or the time at which the device is idle.

        Not the time on the clock: the ranks of a host can share its cores.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return time.perf_counter()
        return time.thread_time()


def _resized(mine: Tensor, size: int) -> Tensor:
    """Return a message of `size` elements that is as much like `mine` as possible."""
    if len(mine) >= size:
        return mine[:size]
    return torch.cat([mine, mine.new_zeros(size - len(mine))])


def record(
    spec: str | Component,
    parameters: Mapping[str, Tensor],
    world_size: int,
    *,
    buckets: Sequence[Group],
    groups: Sequence[Group] | None = None,
    gradients: Mapping[str, Tensor] | None = None,
    nodes: int = 1,
    steps: int = 4,
) -> Recording:
    """Record the exchange of a method among `world_size` ranks, as ``register(model, spec)`` has.

    Args:
        spec: a gradient method. Of a method with a warm-up, this is what follows it.
        parameters: of the model, by name.
        world_size: number of ranks. They need not exist.
        buckets: names of the parameters in each of DDP's buckets, in their order.
        groups: names of the parameters that are compressed together, as for :class:`.Averager`.
        gradients: of this rank, by name. By default, random numbers.
        nodes: number of ranks of a node, for the exchange in two levels.
        steps: number of steps. The first one is not counted.

    Raises:
        SpecError: if the spec cannot be built or not recorded by one rank, or if the nodes do not
            divide the ranks.
    """
    check_count("world_size", world_size, most=MOST_RANKS)
    check_count("steps", steps, least=2)
    check_count("nodes", nodes)
    check_divides(nodes, world_size)
    method = parse_aggregator(spec).settled
    _check_recordable(method)
    make = _TwoLevels if nodes > 1 else _Flat
    rank = make(method, parameters, groups, world_size, nodes)
    values = gradients or _random(parameters)
    shapes = [BucketShape.of(names, parameters) for names in buckets]
    taken = [rank.step([Bucket.read(shape, values) for shape in shapes]) for _ in range(steps)]
    return Recording(str(method), _median(buckets, taken[1:]))


def _check_recordable(method: Aggregator) -> None:
    """Require that one rank can stand for all of them."""
    if not isinstance(method, Bidirectional) or method.selection != "exact":
        return
    if isinstance(method.down, Sparsifier) and method.down.per_tensor:
        # The search for the threshold of a parameter is among the ranks that own parts of it. The
        # rank that records owns no part of most parameters.
        raise SpecError(
            f"{method} cannot be recorded by one rank, because it searches a threshold for each "
            'parameter: predict it with selection="shard", or with another scope',
            "selection",
        )


class _Flat:
    """Averages every bucket over all ranks, as :class:`torchcomp.ddp.averaging.Flat` does."""

    def __init__(
        self,
        method: Component,
        parameters: Mapping[str, Tensor],
        groups: Sequence[Group] | None,
        world_size: int,
        nodes: int,
    ) -> None:
        device = next(iter(parameters.values())).device
        self.exchange = RecordingExchange(world_size, device)
        self.averager = averager = Averager(method, self.exchange, parameters, groups)
        shapes = [averager.shape_of(group) for group in averager.buckets]
        self._reordering = Reordering(shapes if averager.grouped else None)

    def step(self, buckets: Sequence[Bucket]) -> _Taken:
        """Take a step; return its activities by bucket, job and lane."""
        self.averager.begin()
        self._reordering.begin()
        taken = []
        for number, bucket in enumerate(buckets):
            lane: list[Activity] = []
            _fill_caches(bucket.flat.device)
            with self.exchange.recorded(lane):
                for group in self._reordering.add(bucket):
                    self.averager.average(group)
                if number == len(buckets) - 1:
                    # The values that are not there can be of any kind.
                    self.averager.finish(may_skip=True)
            taken.append([[lane]])
        return taken


class _TwoLevels:
    """Averages inside the nodes first, as :class:`torchcomp.ddp.two_level.TwoLevel` does."""

    def __init__(
        self,
        method: Component,
        parameters: Mapping[str, Tensor],
        groups: Sequence[Group] | None,
        world_size: int,
        nodes: int,
    ) -> None:
        device = next(iter(parameters.values())).device
        self._nodes = nodes
        self._between = RecordingExchange(world_size // nodes, device)
        self._inside = RecordingExchange(nodes, device, inside=True)
        pieces = {
            name: Pieces(BucketShape.of((name,), parameters), nodes).like(parameter)
            for name, parameter in parameters.items()
        }
        self._averager = averager = Averager(method, self._between, pieces, groups)
        shapes = [BucketShape.of(group, parameters) for group in averager.buckets]
        self._completed = Completed()
        self._shapes = shapes if averager.grouped else None

    def step(self, buckets: Sequence[Bucket]) -> _Taken:
        """Take a step; return its activities by bucket, job and lane."""
        self._averager.begin()
        self._completed.begin(self._shapes)
        taken = []
        for bucket in buckets:
            completed = self._completed.add(bucket)
            taken.append([self._job(shape, parts) for shape, parts in completed])
        between = next(job[1] for jobs in reversed(taken) for job in reversed(jobs))
        with self._between.recorded(between):
            self._averager.finish(may_skip=True)
        return taken

    def _job(self, shape: BucketShape, parts: dict[str, Tensor]) -> list[list[Activity]]:
        lanes: list[list[Activity]] = [[], [], []]
        _fill_caches(self._inside.device)
        pieces = Pieces(shape, self._nodes)
        dtype = shape.dtype
        with self._inside.recorded(lanes[0]):
            out = torch.empty(
                pieces.ranks * pieces.piece.numel, dtype=dtype, device=self._inside.device
            )
            pieces.cut(parts, out)
            mine = self._inside.reduce_scatter(out, dtype).div_(pieces.ranks)
        with self._between.recorded(lanes[1]):
            self._averager.average(Bucket(pieces.piece, mine))
        with self._inside.recorded(lanes[2]):
            pieces.join(self._inside.all_gather_rows(mine).view(-1), parts)
        return lanes


def record_all_reduce(
    parameters: Mapping[str, Tensor],
    *,
    buckets: Sequence[Group],
    dtype: torch.dtype | None = None,
    steps: int = 4,
) -> Recording:
    """Record plain DDP, or PyTorch's hook that all-reduces in 16 bits.

    DDP issues the all-reduces of its buckets at once. NCCL runs them one after another. gloo has
    two threads, but two all-reduces together took 1.7 to 1.9 times as long as one of them (2 to 8
    ranks, 64 bytes to 4 MiB), so they are modelled one after another as well.

    Args:
        parameters: of the model, by name.
        buckets: names of the parameters in each of DDP's buckets, in their order.
        dtype: ``torch.bfloat16`` for PyTorch's ``bf16_compress_hook``.
        steps: number of times that the work of the hook is measured.
    """
    submitted = []
    for names in buckets:
        shape = BucketShape.of(names, parameters)
        device = parameters[names[0]].device
        if dtype is None:
            job: Job = ((Call(ALL_REDUCE, shape.nbytes),),)
            submitted.append(Submitted(tuple(names), (job,)))
            continue
        tape, flat = _Tape(device), torch.zeros(shape.numel, dtype=shape.dtype, device=device)
        rounds = [_cast(tape, flat, dtype) for _ in range(steps)]
        before, after = (statistics.median(each) for each in zip(*rounds[1:], strict=True))
        reduced = Call(ALL_REDUCE_BF16, shape.numel * dtype.itemsize)
        submitted.append(Submitted(tuple(names), (((reduced, Work(after)),),), before))
    name = "ddp" if dtype is None else str(dtype).removeprefix("torch.")
    return Recording(name, tuple(submitted))


def record_average(
    parameters: Mapping[str, Tensor],
    world_size: int,
    *,
    spec: str | Component = "mean",
    groups: Sequence[Group] | None = None,
    statistics: Mapping[str, Tensor] | None = None,
    steps: int = 4,
) -> Recording:
    """Record a synchronisation of local steps, as :class:`torchcomp.LocalSGD` has it.

    Args:
        parameters: of the model, by name.
        world_size: number of ranks. They need not exist.
        spec: the method that averages.
        groups: names of the parameters that are averaged together.
        statistics: of BatchNorm layers, which are averaged as well.
        steps: number of synchronisations. The first one is not counted.
    """
    check_count("world_size", world_size, most=MOST_RANKS)
    check_count("steps", steps, least=2)
    method = parse_aggregator(spec).settled
    wide = {
        name: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
        for name, p in parameters.items()
    }
    exchange = RecordingExchange(world_size, next(iter(wide.values())).device)
    averager = Averager(method, exchange, wide, groups, merged=False)
    taken = []
    for _ in range(steps):
        lane: list[Activity] = []
        _fill_caches(exchange.device)
        with exchange.recorded(lane):
            exchange.same(0)  # the ranks compare their steps
            averager.begin()
            if statistics:
                exchange.same(0)  # they compare which statistics they have
                exact_mean(exchange, statistics)
            buckets = [Bucket.read(averager.shape_of(group), wide) for group in averager.buckets]
            for bucket in buckets:
                averager.average(bucket)
            averager.finish(may_skip=True)
            for bucket in buckets:
                bucket.write(wide)
        taken.append([[[lane]]])
    return Recording(str(method), _median([tuple(wide)], taken[1:]))


def _cast(tape: _Tape, flat: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Do the work of PyTorch's hook; return the seconds before and after the all-reduce."""
    activities: list[Activity] = []
    _fill_caches(flat.device)
    tape.start(activities)
    narrow = flat.to(dtype).div_(2)
    tape.end()
    tape.start(activities)
    flat.copy_(narrow)
    tape.end()
    before, after = (a.seconds for a in activities if isinstance(a, Work))
    return before, after


def _fill_caches(device: torch.device) -> None:
    """Fill the caches of the processor with other values, as a backward pass does."""
    if device.type == "cpu":
        torch.ones(_CACHE_BYTES // 4).add_(1)


def _random(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        for name, p in parameters.items()
    }


def _median(buckets: Sequence[Group], steps: Sequence[_Taken]) -> tuple[Submitted, ...]:
    """Return the last step, with the median work of the steps that made the same calls."""
    submitted = []
    for number, names in enumerate(buckets):
        jobs = []
        for index, job in enumerate(steps[-1][number]):
            lanes = []
            for lane, last in enumerate(job):
                alike = [step[number][index][lane] for step in steps]
                calls = _calls(last)
                lanes.append(_with_median_work([a for a in alike if _calls(a) == calls]))
            jobs.append(tuple(lanes))
        submitted.append(Submitted(tuple(names), tuple(jobs)))
    return tuple(submitted)


def _calls(activities: Sequence[Activity]) -> list[Call]:
    return [activity for activity in activities if isinstance(activity, Call)]


def _with_median_work(alike: Sequence[Sequence[Activity]]) -> tuple[Activity, ...]:
    combined: list[Activity] = []
    for same in zip(*alike, strict=True):
        works = [activity.seconds for activity in same if isinstance(activity, Work)]
        combined.append(Work(statistics.median(works)) if works else same[0])
    return tuple(combined)
