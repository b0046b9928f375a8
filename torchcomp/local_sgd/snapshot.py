"""Snapshot: what a state dict of local steps holds, and what it must fit."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import nn

from torchcomp import checkpoint
from torchcomp.errors import CheckpointError
from torchcomp.exchange import Exchange
from torchcomp.local_sgd.checks import LocalMethod
from torchcomp.local_sgd.deltas import check_memory
from torchcomp.local_sgd.fragments import Fragment
from torchcomp.local_sgd.progress import Progress, Round

_ADVICE = {
    "spec": "go on with the schedule that the run began with",
    "world_size": "torchcomp.redistribute(states, world_size) makes states that were saved between "
    "rounds fit",
}
_COUNTS = ("step", "syncs")
_ROUND = tuple(field.name for field in fields(Round))
_FIXED = ("total_steps", "warmup_steps", "compress", "outer", "moments")
_KEYS = (
    *_FIXED,
    *_COUNTS,
    *_ROUND,
    *("fragments", "seed", "saved_by", "traffic", "weights", "shapes"),
    *("strides", "buckets", "thresholds", "error", "owner"),
)


def spec_of(method: LocalMethod) -> str:
    """The schedules as one string."""
    return ", ".join(map(str, method.schedules))


def fixed(method: LocalMethod) -> dict[str, Any]:
    """What must not change from a checkpoint to the run that loads it."""
    return {
        "total_steps": method.horizon.total_steps,
        "warmup_steps": method.horizon.warmup_steps,
        "compress": str(method.aggregator),
        "outer": str(method.outer),
        "moments": method.moments,
    }


def clock(progress: Progress) -> dict[str, Any]:
    """The clock, with a list of the rounds' values for each attribute that they have."""
    counts = {name: getattr(progress, name) for name in _COUNTS}
    return counts | {name: [getattr(each, name) for each in progress.rounds] for name in _ROUND}


def set_clock(progress: Progress, state: Mapping[str, Any]) -> None:
    """Restore what :func:`clock` returned."""
    for name in _COUNTS:
        setattr(progress, name, state[name])
    for name in _ROUND:
        for each, value in zip(progress.rounds, state[name], strict=True):
            setattr(each, name, value)


def memory(fragments: list[Fragment]) -> dict[str, Any]:
    """What the fragments' averaging keeps, as one."""
    first, *others = (fragment.averaging.state_dict() for fragment in fragments)
    for other in others:
        for key, value in other.items():
            first[key] = first[key] | value if isinstance(value, dict) else first[key] + value
    return first


def check(
    state: Mapping[str, Any],
    method: LocalMethod,
    fragments: int,
    parameters: Mapping[str, nn.Parameter],
    exchange: Exchange,
) -> None:
    """Require that a state dict belongs to this run and rank.

    Raises:
        CheckpointError: naming what differs.
    """
    checkpoint.check_header(state, spec_of(method), exchange, _KEYS, _ADVICE)
    checkpoint.check_shapes(state["shapes"], parameters)
    here = fixed(method) | {"fragments": fragments}
    there = {**state, "fragments": len(state["fragments"])}
    for name, value in here.items():
        if there[name] != value:
            raise CheckpointError(
                f"the checkpoint was taken with {name}={there[name]}, and this run has "
                f"{name}={value}"
            )
    _check_saver(state, exchange)
    if not method.plain:
        check_memory(state, parameters, exchange)


def _check_saver(state: Mapping[str, Any], exchange: Exchange) -> None:
    """Require this rank's own state, unless it was saved where all ranks held the same values."""
    saver = list(state["saved_by"])
    if max(state["step"] - synced for synced in state["synced"]) > 0 and saver != [
        exchange.rank,
        exchange.world_size,
    ]:
        raise CheckpointError(
            "the checkpoint was taken by rank {} of {} inside a round, and holds that rank's local "
            "progress alone: only states that were saved between rounds (sync.next_sync is None) "
            "fit another number of ranks".format(*saver)
        )
