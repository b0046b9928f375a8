"""explain: what a method sends, keeps and costs, before anything runs."""

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchcomp.aggregators import Aggregator
from torchcomp.bucket import BucketShape, Caps, merge, partition
from torchcomp.checks import check_count
from torchcomp.component import Component
from torchcomp.ddp.checks import bucket_caps, check_is_module, trained_parameters
from torchcomp.errors import SpecError
from torchcomp.learning_rates import Rate
from torchcomp.outer_steps import OuterStep
from torchcomp.plan import Plan
from torchcomp.schedules import Horizon, Schedule, synchronisations
from torchcomp.spec import parse, parse_aggregator, parse_outer_step, parse_schedule
from torchcomp.state import Kind
from torchcomp.time_model import TimeModel, WallClock
from torchcomp.traffic import Load, sum_bytes


def explain(
    spec: str | Component,
    *,
    world_size: int,
    numel: int | None = None,
    model: nn.Module | None = None,
    dtype: torch.dtype = torch.float32,
    lr: Rate | None = None,
    total_steps: int | None = None,
    warmup_steps: int = 0,
    compress: str | Component = "mean",
    outer: str | OuterStep | None = None,
    time: TimeModel | None = None,
    rank: int = 0,
) -> Plan:
    """Work out what a method sends per rank and step; a real run's counted bytes equal it.

    The exception is a selection from a whole bucket that is sharded, such as bidirectional's
    "exact": there the entries are taken to fall evenly into the shards, and the threshold of a
    step before to be known. The first step has none, and sends more.

    Args:
        spec: a method, ``"ef(topk(0.01))"``, or a schedule, ``"qsr(alpha=0.0175, h_base=4)"``.
        world_size: number of ranks.
        numel: number of gradient elements, taken as one vector; or give `model`.
        model: a module, or a DDP model, whose parameters are grouped as in training.
        dtype: gradient dtype that goes with `numel`.
        lr: for a schedule that reads it, learning rate as a function of the steps taken so far.
        total_steps: for a schedule, optimizer steps of the run.
        warmup_steps: for a schedule, steps of warm-up.
        compress: for a schedule, the method that averages, as in :class:`torchcomp.LocalSGD`.
        outer: for a schedule, the outer step, as in :class:`torchcomp.LocalSGD`.
        time: for a schedule without `compress`, the constants of a cluster, for the wall clocks of
            the run.
        rank: whose traffic; ranks differ by a few bytes where shards are uneven.

    Raises:
        SpecError: if the spec cannot be built, or an argument cannot be used, is missing, or is not
            for such a spec.
        ScheduleError: if the schedule cannot use a rate.
        UnsupportedModelError: if `model` is no module.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise SpecError(f"dtype must be a floating-point torch.dtype, not {dtype!r}")
    check_count("world_size", world_size)
    built = parse(spec)
    average = _Average(
        parse_aggregator(compress), None if outer is None else parse_outer_step(outer)
    )
    aggregator = average.aggregator if isinstance(built, Schedule) else built
    shapes = _shapes(numel, model, dtype, aggregator.whole_model)
    if isinstance(built, Schedule):
        run = _run(built, lr, total_steps, warmup_steps)
        return _explain_schedule(run, average, shapes, world_size, time, rank)
    options = {"lr": lr, "total_steps": total_steps, "warmup_steps": warmup_steps or None}
    given = {**average.options, **options, "time": time}
    foreign = [name for name, value in given.items() if value is not None]
    if foreign:
        raise SpecError(f"{foreign[0]}= is for schedules, and '{built}' is a gradient method")
    return _explain_method(built, shapes, world_size, rank)


def sync_steps(
    spec: str | Component,
    *,
    lr: Rate | None = None,
    total_steps: int,
    warmup_steps: int = 0,
) -> list[int]:
    """The global steps at which a run synchronises: t is the end of the t-th step.

    Args:
        spec: a schedule, ``"qsr(alpha=0.0175, h_base=4)"``.
        lr: for a schedule that reads it, learning rate of a step as a function of the number of
            steps before it.
        total_steps: optimizer steps of the run.
        warmup_steps: steps of warm-up.

    Raises:
        SpecError: if the schedule or the horizon cannot be built, or `lr` is missing or is no
            function.
        ScheduleError: if the schedule cannot use a rate.
    """
    return synchronisations(parse_schedule(spec), lr, Horizon(total_steps, warmup_steps))


def _explain_method(
    aggregator: Aggregator, shapes: list[BucketShape], world_size: int, rank: int
) -> Plan:
    costs = [aggregator.cost(shape, world_size, rank) for shape in shapes]
    load = Load()
    for cost in costs:
        load.add(cost.load)
    moved = load.traffic(world_size, sum_bytes(_nbytes(shapes), world_size))
    kept = [slot for shape in shapes for slot in aggregator.slots(shape, world_size, rank)]
    return Plan(
        spec=str(aggregator),
        numel=_numel(shapes),
        world_size=world_size,
        collective=" and ".join(sorted({cost.collective for cost in costs})),
        message_bytes=sum(cost.message_bytes for cost in costs),
        bytes_sent=moved.sent,
        bytes_received=moved.received,
        dense_bytes_sent=moved.dense,
        # As they were before the step, and after it, for roll-back.
        memory_bytes=sum(
            2 * slot.numel * slot.dtype.itemsize for slot in kept if slot.kind is not Kind.CACHE
        ),
        break_even_world_size=_break_even(aggregator, shapes, world_size, _nbytes(shapes)),
    )


def _break_even(
    aggregator: Aggregator, shapes: list[BucketShape], world_size: int, dense: int | Fraction
) -> int | None:
    """Where an all-gather, whose traffic grows with the ranks, reaches plain DDP's.

    `dense` counts the bytes of gradients that plain DDP reduces in the time of one exchange.
    """
    costs = [aggregator.cost(shape, world_size) for shape in shapes]
    if {cost.collective for cost in costs} != {"allgather"} or world_size < 2:
        return None
    each = sum(cost.load.sent for cost in costs) // (world_size - 1)
    # (W - 1) each >= 2 (W - 1) dense / W  <=>  W >= 2 dense / each
    return math.ceil(Fraction(2 * dense, each)) if each else None


@dataclass(frozen=True)
class _Average:
    """How a synchronisation averages."""

    aggregator: Aggregator
    outer: OuterStep | None

    @property
    def options(self) -> dict[str, Component]:
        """What differs from a plain average, by the names that LocalSGD gives it."""
        options: dict[str, Component] = {}
        if not self.aggregator.transparent:
            options["compress"] = self.aggregator
        if self.outer is not None:
            options["outer"] = self.outer
        return options

    @property
    def copies(self) -> int:
        """Copies of the parameters that a rank keeps: of the round's start, and a momentum."""
        return bool(self.options) + (self.outer is not None)


@dataclass(frozen=True)
class _Run:
    """A schedule at work: its learning rate, if it reads one, and how often it synchronises."""

    schedule: Schedule
    lr: Rate | None
    horizon: Horizon
    syncs: int


def _run(schedule: Schedule, lr: Rate | None, total_steps: int | None, warmup_steps: int) -> _Run:
    if total_steps is None:
        raise SpecError(f"to explain the schedule '{schedule}', give total_steps")
    horizon = Horizon(total_steps, warmup_steps)
    return _Run(schedule, lr, horizon, len(synchronisations(schedule, lr, horizon)))


def _explain_schedule(
    run: _Run,
    average: _Average,
    shapes: list[BucketShape],
    world_size: int,
    time: TimeModel | None,
    rank: int,
) -> Plan:
    aggregator, total_steps = average.aggregator, run.horizon.total_steps
    # Parameters are averaged in float32 or wider.
    wide = [shape.wide() for shape in shapes]
    once = _explain_method(aggregator, wide, world_size, rank)
    per_sync = Fraction(total_steps, run.syncs)
    if time is not None and not aggregator.transparent:
        raise SpecError("time= models all-reduce alone: leave compress= out, or time=")
    clocks = (None, None) if time is None else _clocks(run, shapes, wide, world_size, time)
    options = ", ".join(f"{name}={option}" for name, option in average.options.items())
    return Plan(
        spec=f"{run.schedule} with {options}" if options else str(run.schedule),
        numel=once.numel,
        world_size=world_size,
        collective=once.collective,
        message_bytes=once.message_bytes,
        bytes_sent=round(once.bytes_sent / per_sync),
        bytes_received=round(once.bytes_received / per_sync),
        dense_bytes_sent=sum_bytes(_nbytes(shapes), world_size),
        memory_bytes=once.memory_bytes + average.copies * _nbytes(wide),
        break_even_world_size=_break_even(aggregator, wide, world_size, _nbytes(shapes) * per_sync),
        syncs=run.syncs,
        total_steps=total_steps,
        wall_clock=clocks[0],
        parallel_wall_clock=clocks[1],
    )


def _clocks(
    run: _Run,
    shapes: list[BucketShape],
    wide: list[BucketShape],
    world_size: int,
    time: TimeModel,
) -> tuple[WallClock, WallClock]:
    """Wall clocks of the schedule and of plain DDP."""
    steps = {"total_steps": run.horizon.total_steps, "world_size": world_size}
    local = time.local(
        run.schedule,
        lr=run.lr,
        warmup_steps=run.horizon.warmup_steps,
        nbytes=_nbytes(wide),
        **steps,
    )
    return local, time.parallel(nbytes=_nbytes(shapes), **steps)


def _shapes(
    numel: int | None, model: nn.Module | None, dtype: torch.dtype, merged: bool
) -> list[BucketShape]:
    if model is not None and numel is None:
        return _model_shapes(model, merged)
    if model is not None or numel is None:
        raise SpecError("explain needs either numel=, a number of elements, or model=")
    check_count("numel", numel, least=0)
    return [BucketShape(("gradient",), ((numel,),), dtype)]


def _model_shapes(model: nn.Module, merged: bool) -> list[BucketShape]:
    check_is_module(model)
    if isinstance(model, DistributedDataParallel):
        parameters, caps = dict(trained_parameters(model)), bucket_caps(model)
    else:
        named = model.named_parameters()
        parameters, caps = {name: p for name, p in named if p.requires_grad}, Caps()
    groups = partition(parameters.items(), caps)
    wanted = merge(groups, parameters) if merged else groups
    return [BucketShape.of(group, parameters) for group in wanted]


def _numel(shapes: list[BucketShape]) -> int:
    return sum(shape.numel for shape in shapes)


def _nbytes(shapes: list[BucketShape]) -> int:
    return sum(shape.nbytes for shape in shapes)
