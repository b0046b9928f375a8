"""explain: compute what a method sends, stores and costs, without a run."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import astuple, replace
from fractions import Fraction

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchcomp.advisor.costs import NodePlan, Plan
from torchcomp.aggregators import Aggregator, planned_traffic, planned_two_levels
from torchcomp.checkpoints.pieces import pieces_of
from torchcomp.ddp.checks import bucket_caps, check_is_module, trained_parameters
from torchcomp.engine.bucket import DEFAULT_CAPS, BucketShape, merge, partition
from torchcomp.engine.state import Kind
from torchcomp.exchange.nodes import check_divides
from torchcomp.exchange.traffic import Traffic, sum_bytes
from torchcomp.local_sgd.batchnorm import statistics_of, updated_layers
from torchcomp.local_sgd.outer_steps import OuterStep
from torchcomp.local_sgd.schedules import Horizon, Schedule, synchronisations
from torchcomp.specs.checks import check_count
from torchcomp.specs.component import Component
from torchcomp.specs.errors import SpecError
from torchcomp.specs.learning_rates import LRFunction
from torchcomp.specs.spec import parse, parse_aggregator, parse_outer_step, parse_schedule

MOST_RANKS = 10**6
"""Largest number of ranks that a plan can be made for. No cluster has more GPUs."""

Shapes = Sequence[BucketShape]


def explain(
    spec: str | Component,
    *,
    world_size: int,
    numel: int | None = None,
    model: nn.Module | None = None,
    dtype: torch.dtype = torch.float32,
    lr: LRFunction | None = None,
    total_steps: int | None = None,
    warmup_steps: int = 0,
    compress: str | Component = "mean",
    outer: str | OuterStep | None = None,
    rank: int = 0,
    nodes: int | None = None,
) -> Plan:
    """Compute what a method sends per rank and step.

    The numbers equal the bytes that a real run counts. The exception is a selection from a whole
    bucket that is sharded, such as bidirectional's "exact". For it, explain assumes that the
    selected entries are spread evenly over the shards, and that the threshold of the previous step
    is known. The first step of a run has no threshold and sends more.

    Args:
        spec: a method, ``"ef(topk(0.01))"``, or a schedule, ``"qsr(alpha=0.0175, h_base=4)"``.
        world_size: number of ranks, at most :data:`MOST_RANKS`.
        numel: number of gradient elements, as one vector; pass either `numel` or `model`.
        model: a module or a DDP model. Its parameters are grouped as in training.
        dtype: gradient dtype, used with `numel`.
        lr: for a schedule that reads it, learning rate as a function of the steps taken so far.
        total_steps: for a schedule, optimizer steps of the run.
        warmup_steps: for a schedule, steps of warm-up.
        compress: for a schedule, the method that averages, as in :class:`torchcomp.LocalSGD`.
        outer: for a schedule, the outer step, as in :class:`torchcomp.LocalSGD`.
        rank: the rank whose traffic is computed. Ranks differ by a few bytes if shards are uneven.
        nodes: for a method, the number of ranks of a node, which share its network card. Adds the
            bytes through the card, for the flat method and for ``register(..., nodes=nodes)``.
            Those inside a node are uncompressed, without ``inside="bf16"``.

    Raises:
        SpecError: if the spec cannot be built, or if an argument is invalid, missing or does not
            apply to this kind of spec.
        ScheduleError: if the schedule cannot use a learning rate.
        UnsupportedModelError: if `model` is not a module.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise SpecError(f"dtype must be a floating-point torch.dtype, not {dtype!r}")
    check_count("world_size", world_size, 1, MOST_RANKS)
    check_count("rank", rank, 0, world_size - 1)
    if nodes is not None:
        check_count("nodes", nodes)
        check_divides(nodes, world_size)
        nodes = int(nodes)
    # NumPy's integers would overflow.
    world_size, rank = int(world_size), int(rank)
    built, average = parse(spec), parse_aggregator(compress)
    # What a synchronisation does in addition to a plain average, by LocalSGD's argument names.
    extra: dict[str, Component] = {} if average.transparent else {"compress": average}
    if outer is not None:
        extra["outer"] = parse_outer_step(outer)
    method = built if isinstance(built, Aggregator) else average
    shapes = _shapes(numel, model, dtype, method.whole_model)
    if isinstance(built, Aggregator):
        horizon = {"lr": lr, "warmup_steps": warmup_steps or None, "total_steps": total_steps}
        given = [*extra, *(name for name, value in horizon.items() if value is not None)]
        if given:  # Ignored silently, it would let a wrong plan look right.
            raise SpecError(
                f"{given[0]} applies to schedules only, but '{built}' is a gradient method: "
                f"leave {given[0]} out, or pass a schedule such as 'every(4)'"
            )
        plan = _explain_method(built, shapes, _nbytes(shapes), world_size, rank)
        if nodes is None:
            return plan
        return replace(plan, nodes=_explain_nodes(built, shapes, world_size, rank, nodes))
    if nodes is not None:
        raise SpecError(
            f"nodes applies to gradient methods only, but '{built}' is a schedule of local steps: "
            "leave nodes out, or pass a method such as 'ef(topk(0.01))'"
        )
    if total_steps is None:
        raise SpecError(
            f"'{built}' is a schedule and needs total_steps, the optimizer steps of the run"
        )
    syncs = len(synchronisations(built, lr, Horizon(total_steps, warmup_steps)))
    # BatchNorm's statistics are all-reduced with the parameters.
    statistics = {} if model is None else statistics_of(updated_layers(model))
    averaged = sum(each.numel() * max(4, each.itemsize) for each in statistics.values())
    more = syncs * sum_bytes(averaged, world_size)
    return _explain_schedule(
        built, syncs, total_steps, average, extra, shapes, more, world_size, rank
    )


def sync_steps(
    spec: str | Component, *, lr: LRFunction | None = None, total_steps: int, warmup_steps: int = 0
) -> list[int]:
    """Return the steps, counted from 1, after which a run synchronises.

    Args:
        spec: a schedule, ``"qsr(alpha=0.0175, h_base=4)"``.
        lr: for a schedule that reads it, learning rate of a step as a function of the number of
            steps before it.
        total_steps: optimizer steps of the run.
        warmup_steps: steps of warm-up.

    Raises:
        SpecError: if an argument is invalid, or if the schedule needs `lr` and it is missing.
        ScheduleError: if the schedule cannot use a learning rate.
    """
    return synchronisations(parse_schedule(spec), lr, Horizon(total_steps, warmup_steps))


def _explain_method(
    aggregator: Aggregator, shapes: list[BucketShape], dense: int, world_size: int, rank: int
) -> Plan:
    """Return the plan of one exchange, in place of which plain DDP reduces `dense` bytes."""
    warmup_steps = aggregator.stages[-1]
    costs = [aggregator.settled.cost(shape, world_size, rank) for shape in shapes]
    moved = planned_traffic(aggregator, shapes, world_size, rank)
    warmup = _moved(aggregator, shapes, world_size, rank, warmup_steps)
    return Plan(
        spec=str(aggregator),
        numel=sum(shape.numel for shape in shapes),
        world_size=world_size,
        collective=" and ".join(sorted({cost.collective for cost in costs})),
        message_bytes=sum(cost.message_bytes for cost in costs),
        bytes_sent=moved.sent,
        bytes_received=moved.received,
        dense_bytes_sent=moved.dense,
        memory_bytes=_memory_bytes(aggregator, shapes, world_size, rank),
        break_even_world_size=_break_even(aggregator, shapes, dense),
        warmup_steps=warmup_steps or None,
        warmup_bytes_sent=round(warmup.sent / warmup_steps) if warmup_steps else None,
    )


def _memory_bytes(
    aggregator: Aggregator, shapes: list[BucketShape], world_size: int, rank: int
) -> int:
    kept = [slot for shape in shapes for slot in aggregator.slots(shape, world_size, rank)]
    # Two copies, before and after the step, because a step that fails is rolled back. Caches are
    # left out.
    return sum(2 * slot.numel * slot.dtype.itemsize for slot in kept if slot.kind is not Kind.CACHE)


def _explain_nodes(
    aggregator: Aggregator, shapes: list[BucketShape], world_size: int, rank: int, node: int
) -> NodePlan:
    flat = planned_traffic(aggregator, shapes, world_size, rank, node)
    two_levels = planned_two_levels(aggregator, shapes, world_size, node, rank)
    pieces = pieces_of(shapes, node)
    return NodePlan(
        ranks=node,
        dense_card_bytes=flat.dense,
        flat_card_bytes=flat.sent,
        # The ranks of a node have pieces of equal shape, and send the same.
        card_bytes=node * two_levels.sent,
        bytes_sent=two_levels.sent,
        inside_bytes_sent=two_levels.inside,
        memory_bytes=_memory_bytes(aggregator, pieces, world_size // node, rank // node),
    )


def _moved(
    aggregator: Aggregator, shapes: list[BucketShape], world_size: int, rank: int, exchanges: int
) -> Traffic:
    total = Traffic()
    for method, steps in aggregator.spans(exchanges):
        once = planned_traffic(method, shapes, world_size, rank)
        total.add(Traffic(*(steps * count for count in astuple(once))))
    return total


def _explain_schedule(
    schedule: Schedule,
    syncs: int,
    total_steps: int,
    average: Aggregator,
    extra: dict[str, Component],
    shapes: list[BucketShape],
    more: int,
    world_size: int,
    rank: int,
) -> Plan:
    """Return the plan of a run with so many averages, which send `more` bytes of statistics."""
    # LocalSGD averages parameters in float32 or wider.
    wide = [shape.wide() for shape in shapes]
    # What plain DDP reduces from one average to the next.
    dense = int(_nbytes(shapes) * Fraction(total_steps, syncs))
    once = _explain_method(average, wide, dense, world_size, rank)
    moved = _moved(average, wide, world_size, rank, syncs)
    options = ", ".join(f"{name}={option}" for name, option in extra.items())
    # State per rank: the parameters at the start of the round, if they are needed, and the outer
    # momentum, if there is an outer step.
    copies = bool(extra) + ("outer" in extra)
    return replace(
        once,
        spec=f"{schedule} with {options}" if options else str(schedule),
        bytes_sent=round(Fraction(moved.sent + more, total_steps)),
        bytes_received=round(Fraction(moved.received + more, total_steps)),
        dense_bytes_sent=sum_bytes(_nbytes(shapes), world_size),
        memory_bytes=once.memory_bytes + copies * _nbytes(wide),
        warmup_steps=None,
        warmup_bytes_sent=None,
        syncs=syncs,
        total_steps=total_steps,
    )


def _shapes(
    numel: int | None, model: nn.Module | None, dtype: torch.dtype, merged: bool
) -> list[BucketShape]:
    if numel is not None and model is None:
        check_count("numel", numel, least=0)
        return [BucketShape(("gradient",), ((int(numel),),), dtype)]
    if model is None or numel is not None:
        raise SpecError(
            "explain needs either numel, the number of elements, or model, but got "
            f"{'neither' if model is None else 'both'}"
        )
    check_is_module(model)
    # DDP reduces each shared parameter once, and named_parameters() also yields it once.
    if isinstance(model, DistributedDataParallel):
        parameters, caps = dict(trained_parameters(model)), bucket_caps(model)
    else:
        named = model.named_parameters()
        parameters, caps = {name: p for name, p in named if p.requires_grad}, DEFAULT_CAPS
    groups = partition(parameters.items(), caps)
    wanted = merge(groups, parameters) if merged else groups
    return [BucketShape.of(group, parameters) for group in wanted]


def _nbytes(shapes: list[BucketShape]) -> int:
    return sum(shape.nbytes for shape in shapes)


def _break_even(method: Aggregator, shapes: Shapes, dense: int) -> int | None:
    """Return the smallest world size at which a method sends at least as much as plain DDP.

    That is what DDP sends for `dense` bytes of gradients. None if there is none up to MOST_RANKS,
    or if all messages are all-reduced: their share of DDP's bytes is the same on any ranks.
    """

    def loses(world_size: int) -> bool:
        # The last rank owns the largest shard.
        moved = planned_traffic(method, shapes, world_size, world_size - 1)
        return moved.sent >= sum_bytes(dense, world_size)

    summed = all(
        method.settled.cost(shape, MOST_RANKS).collective == "allreduce" for shape in shapes
    )
    if not dense or summed or not loses(MOST_RANKS):
        return None
    # The share of plain DDP's bytes grows with the number of ranks, or stays.
    return bisect_left(range(MOST_RANKS), True, lo=2, key=loses)
