"""Recording: the exchange of a step, without the ranks that it is made for.

A method runs on this rank alone, over an exchange that pretends to have any number of ranks: it
notes each collective with its size, and the work of this rank before it. What the other ranks would
send is a copy of what this rank sends. One mechanism therefore covers every method and every route.
"""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchcomp.advisor.collectives import ALL_GATHER, ALL_REDUCE, ALL_REDUCE_BF16, ALL_TO_ALL
from torchcomp.advisor.simulation import Activity, Call, Recording, Submitted, Work
from torchcomp.aggregators import Bidirectional
from torchcomp.compressors.sparse import Sparsifier
from torchcomp.ddp.reordering import Reordering
from torchcomp.engine.averager import Averager
from torchcomp.engine.bucket import Bucket, BucketShape, Group
from torchcomp.exchange import Exchange
from torchcomp.local_sgd.averages import exact_mean
from torchcomp.routes.wire import Frames
from torchcomp.specs.checks import check_count
from torchcomp.specs.component import Component
from torchcomp.specs.errors import SpecError
from torchcomp.specs.spec import parse_aggregator

MOST_RANKS = 1024  # one rank decodes the messages of all of them
MOST_ELEMENTS = 300_000_000  # of a model: a recording takes 20 to 40 bytes per element

_CACHE_BYTES = 2**25
_COPIED_BYTES = 2**28  # up to this, each message of an all-gather has memory of its own

Parameters = Mapping[str, Tensor]
"""Parameters of a model, by name."""


class PretendedExchange(Exchange):
    """The exchange of rank 0 of `world_size` ranks that are not there.

    It notes its collectives, and the work between them. Rank 0 gets copies of its own messages.
    """

    def __init__(self, world_size: int, device: torch.device) -> None:
        super().__init__(0, world_size, device)
        self._onto: list[Activity] | None = None
        self._since = 0.0

    @contextmanager
    def recorded(self, onto: list[Activity]) -> Iterator[None]:
        """Append the activities of the block to `onto`: works, and the collectives between them."""
        self._onto, self._since = onto, worked(self.device)
        yield
        onto.append(Work(worked(self.device) - self._since))
        self._onto = None

    @contextmanager
    def _noted(self, kind: str, nbytes: int) -> Iterator[None]:
        if self._onto is not None:
            self._onto.append(Work(worked(self.device) - self._since))
            self._onto.append(Call(kind, nbytes))
        yield
        self._since = worked(self.device)

    def check(self, frames: Frames, received: Tensor, senders: Sequence[int]) -> None:
        super().check(frames, received, senders)
        # A copy of this rank's message can have another length than the message that it stands for.
        self._headers.clear()

    def gather_objects(self, value: Any, dst: int | None = None) -> list[Any]:
        return [value] * self.world_size

    def _all_reduce(self, values: Tensor) -> None:
        narrow = values.dtype in (torch.bfloat16, torch.float16)
        with self._noted(ALL_REDUCE_BF16 if narrow else ALL_REDUCE, values.nbytes):
            pass  # the size of the values does not matter

    def _all_gather(self, mine: Tensor) -> Tensor:
        with self._noted(ALL_GATHER, mine.nbytes):
            # Many large messages share their memory, which one rank may not have for all of them.
            gathered = mine.expand(self.world_size, -1)
            return gathered.contiguous() if gathered.nbytes <= _COPIED_BYTES else gathered

    def _all_to_all(
        self, outgoing: Tensor, sizes: Sequence[int], arriving: Sequence[int]
    ) -> Tensor:
        with self._noted(ALL_TO_ALL, outgoing.element_size() * (sum(sizes) - sizes[self.rank])):
            mine = outgoing[: sizes[0]]
            return torch.cat([_resized(mine, size) for size in arriving])


def _resized(mine: Tensor, size: int) -> Tensor:
    """Return a message of `size` elements that is as much like `mine` as possible."""
    return torch.cat([mine[:size], mine.new_zeros(max(0, size - len(mine)))])


def worked(device: torch.device) -> float:
    """Return the seconds that this thread has worked, or the time at which the device is idle.

    On the CPU, the time on the clock would show the work of the other ranks of the host.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.thread_time()


def record(
    spec: str | Component,
    parameters: Parameters,
    world_size: int,
    *,
    buckets: Sequence[Group],
    groups: Sequence[Group] | None = None,
    gradients: Parameters | None = None,
    steps: int = 4,
) -> Recording:
    """Record the exchange of a method among `world_size` ranks, as ``register(model, spec)`` has.

    Of a method with a warm-up, this is what follows it. `buckets` are the names of the parameters
    in each of DDP's buckets, in their order; `groups` those that are compressed together. By
    default, the gradients of this rank are random. The first one of the steps is not counted.
    """
    check_count("world_size", world_size, most=MOST_RANKS)
    method = parse_aggregator(spec).settled
    if isinstance(method, Bidirectional) and method.selection == "exact":
        down = method.down
        if isinstance(down, Sparsifier) and down.scope == "tensor":
            # The rank that records owns no part of most parameters.
            raise SpecError(
                f"{method} searches a threshold for each parameter, among the ranks that own parts "
                "of it, so one rank cannot record it: choose another scope or selection",
                "selection",
            )
    exchange = PretendedExchange(world_size, next(iter(parameters.values())).device)
    averager = Averager(method, exchange, parameters, groups)
    reordering = Reordering([averager.shape_of(group) for group in averager.buckets])
    shapes = [BucketShape.of(names, parameters) for names in buckets]
    values = gradients or random_values(parameters, exchange.device)
    taken = []
    for _ in range(steps):
        lanes: list[list[Activity]] = [[] for _ in shapes]
        averager.begin()
        for lane, bucket in zip(lanes, [Bucket.read(s, values) for s in shapes], strict=True):
            _fill_caches(exchange.device)
            with exchange.recorded(lane):
                for group in reordering.add(bucket) if averager.grouped else (bucket,):
                    averager.average(group)
                if lane is lanes[-1]:
                    # The values that are not there can be of any kind.
                    averager.finish(may_skip=True)
        taken.append(lanes)
    return Recording(str(method), _median(buckets, taken[1:]))


def record_all_reduce(
    parameters: Parameters,
    *,
    buckets: Sequence[Group],
    dtype: torch.dtype | None = None,
    steps: int = 4,
) -> Recording:
    """Record plain DDP, or PyTorch's hook that all-reduces in 16 bits (`dtype`).

    DDP issues the all-reduces of its buckets at once. NCCL runs them one after another. gloo has
    two threads, but two all-reduces together took 1.7 to 1.9 times as long as one of them (2 to 8
    ranks, 64 bytes to 4 MiB), so they are modelled one after another as well.
    """
    submitted = []
    for names in buckets:
        shape = BucketShape.of(names, parameters)
        if dtype is None:
            submitted.append(Submitted(tuple(names), (Call(ALL_REDUCE, shape.nbytes),)))
            continue
        flat = torch.zeros(shape.numel, dtype=shape.dtype, device=parameters[names[0]].device)
        rounds = [_cast(flat, dtype) for _ in range(steps)]
        before, after = (statistics.median(each) for each in zip(*rounds[1:], strict=True))
        reduced = Call(ALL_REDUCE_BF16, shape.numel * dtype.itemsize)
        submitted.append(Submitted(tuple(names), (reduced, Work(after)), before))
    name = "ddp" if dtype is None else str(dtype).removeprefix("torch.")
    return Recording(name, tuple(submitted))


def record_average(
    parameters: Parameters,
    world_size: int,
    *,
    spec: str | Component = "mean",
    groups: Sequence[Group] | None = None,
    statistics: Parameters | None = None,
    steps: int = 4,
) -> Recording:
    """Record a synchronisation of local steps, with BatchNorm's statistics if there are any."""
    check_count("world_size", world_size, most=MOST_RANKS)
    method = parse_aggregator(spec).settled
    wide = {
        name: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
        for name, p in parameters.items()
    }
    exchange = PretendedExchange(world_size, next(iter(wide.values())).device)
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
        taken.append([lane])
    return Recording(str(method), _median([tuple(wide)], taken[1:]))


def _cast(flat: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Do the work of PyTorch's hook; return the seconds before and after the all-reduce."""
    _fill_caches(flat.device)
    began = worked(flat.device)
    narrow = flat.to(dtype).div_(2)
    before = worked(flat.device)
    flat.copy_(narrow)
    return before - began, worked(flat.device) - before


def _fill_caches(device: torch.device) -> None:
    """Fill the caches of the processor with other values, as a backward pass does."""
    if device.type == "cpu":
        torch.ones(_CACHE_BYTES // 4).add_(1)


def random_values(parameters: Parameters, device: str | torch.device) -> dict[str, Tensor]:
    """Return random numbers with the shapes and dtypes of parameters, by name."""
    total = sum(parameter.numel() for parameter in parameters.values())
    if not 0 < total <= MOST_ELEMENTS:
        raise SpecError(
            "the exchange of a model is recorded on this machine, which takes up to 40 bytes per "
            f"element: a model must have from 1 to {MOST_ELEMENTS:,} elements, not {total:,}"
        )
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(p.shape, generator=generator).to(device, p.dtype)
        for name, p in parameters.items()
    }


def _median(
    buckets: Sequence[Group], steps: Sequence[Sequence[Sequence[Activity]]]
) -> tuple[Submitted, ...]:
    """Return the last step, with the median work of the steps that made the same calls."""
    submitted = []
    for names, *every in zip(buckets, *steps, strict=True):
        alike = [each for each in every if _calls(each) == _calls(every[-1])]
        submitted.append(Submitted(tuple(names), tuple(map(_middle, *alike))))
    return tuple(submitted)


def _calls(activities: Sequence[Activity]) -> list[Call]:
    return [activity for activity in activities if isinstance(activity, Call)]


def _middle(*same: Activity) -> Activity:
    works = [activity.seconds for activity in same if isinstance(activity, Work)]
    return Work(statistics.median(works)) if works else same[0]
