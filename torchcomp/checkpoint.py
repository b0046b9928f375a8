"""Checkpoint: what a state dict must say so that it cannot be loaded into the wrong run."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchcomp.bucket import Group, Shard, memory_order, owned_shards, shards
from torchcomp.errors import CheckpointError
from torchcomp.exchange import Exchange

ONE_STEP = "Every rank loads its own state of one and the same step, or none does."
"""Advice for ranks that do not stand at the same step."""

VERSION = 2
_HEADER = ("version", "spec", "rank", "world_size")


def header(spec: str, exchange: Exchange) -> dict[str, Any]:
    """What identifies the run and the rank that a state dict belongs to."""
    return {
        "version": VERSION,
        "spec": spec,
        "rank": exchange.rank,
        "world_size": exchange.world_size,
    }


def shapes(parameters: Mapping[str, nn.Parameter]) -> dict[str, list[int]]:
    """Shape of each parameter by name, as a checkpoint holds it."""
    return {name: list(parameter.shape) for name, parameter in parameters.items()}


def strides(parameters: Mapping[str, nn.Parameter]) -> dict[str, list[int]]:
    """Strides of each parameter by name: an owner's memory is in the order that they give."""
    return {name: list(parameter.stride()) for name, parameter in parameters.items()}


def groups(names: Iterable[Iterable[str]]) -> tuple[Group, ...]:
    """Groups of names as they were before a checkpoint made lists of them."""
    return tuple(tuple(group) for group in names)


def check_memory(
    state: Mapping[str, Any], parameters: Mapping[str, nn.Parameter], exchange: Exchange
) -> None:
    """Require that error memories are whole, and fit a model and this rank's shards.

    Raises:
        CheckpointError: naming what is missing, unknown, or of another size.
    """
    check_division("buckets", state["buckets"], parameters)
    if len(state["thresholds"]) != len(state["buckets"]):
        raise CheckpointError(
            f"a damaged checkpoint: {len(state['thresholds'])} thresholds for "
            f"{len(state['buckets'])} buckets"
        )
    owned = owned_shards(groups(state["buckets"]), parameters, exchange.rank, exchange.world_size)
    check_whole("error", state["error"], parameters)
    check_whole("owner", state["owner"], sizes(owned))
    check_owner(state, owned, parameters)


def check_division(what: str, names: Iterable[Iterable[str]], parameters: Iterable[str]) -> None:
    """Require groups of names that hold every parameter once.

    Raises:
        CheckpointError: naming those that they do not.
    """
    held, expected = Counter(n for group in names for n in group), Counter(iter(parameters))
    if held != expected:
        raise CheckpointError(
            f"a damaged checkpoint: its {what} must hold every parameter of the model once, and do "
            f"not for {_listed([*(held - expected), *(expected - held)])}"
        )


def check_whole(what: str, memory: Collection[str], names: Collection[str]) -> None:
    """Require a memory of nothing, or of exactly these parameters: one less is a loss.

    Raises:
        CheckpointError: naming those that are missing or unknown.
    """
    differing = {
        "lacks": sorted(set(names) - set(memory)),
        "holds the foreign": sorted(set(memory) - set(names)),
    }
    problems = [f"{verb} {_listed(found)}" for verb, found in differing.items() if found]
    if memory and problems:
        raise CheckpointError(
            f"a damaged checkpoint: its '{what}' must hold each of this rank's {len(names)} "
            f"parameters, or none, and {' and '.join(problems)}"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"'{name}'" for name in names[:3]) + more


def sizes(owned: Iterable[Shard]) -> dict[str, int]:
    """How many elements of each parameter an owner of shards holds."""
    return {n: s for shard in owned for n, s in zip(shard.names, shard.sizes, strict=True)}


def check_owner(
    state: Mapping[str, Any], owned: Iterable[Shard], parameters: Mapping[str, nn.Parameter]
) -> None:
    """Require that what a checkpoint owes as an owner lies in this rank's shards.

    Raises:
        CheckpointError: naming the parameter whose memory order or piece differs.
    """
    mine = sizes(owned)
    here = strides(parameters)
    for name, part in state["owner"].items():
        if part.numel() != mine.get(name, 0):
            raise CheckpointError(
                f"the checkpoint owes {part.numel()} elements of '{name}', and this rank owns "
                f"{mine.get(name, 0)}: torchcomp.redistribute(states, world_size) divides the "
                "memory of owners anew"
            )
        saved = state["strides"].get(name)
        if saved != here[name]:
            raise CheckpointError(
                f"'{name}' has strides {saved} in the checkpoint and {here[name]} in the model: "
                "bring the model into the memory format that it was saved in"
            )


def on_devices(
    tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Copies of per-parameter tensors, on their parameters' devices."""
    return {name: t.to(parameters[name].device, copy=True) for name, t in tensors.items()}


def check_header(
    state: Mapping[str, Any],
    spec: str,
    exchange: Exchange,
    keys: Iterable[str],
    advice: Mapping[str, str],
) -> None:
    """Require a state dict of this version, method, rank and world size, with all its keys.

    Args:
        state: what the user wants to load.
        spec: the method or schedule that it must be of.
        exchange: the ranks of this run.
        keys: what else a state dict of the caller holds.
        advice: what to do about a "spec" or "world_size" that differs.

    Raises:
        CheckpointError: naming both values, and what to do.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(f"expected a state dict, not {type(state).__name__}")
    wanted = header(spec, exchange)
    missing = [name for name in (*wanted, *keys) if name not in state]
    if missing:
        raise CheckpointError(f"not a state dict of torchcomp: it lacks {', '.join(missing)}")
    advice = {
        "version": "save it again with this version of torchcomp",
        "rank": "every rank loads what it saved itself",
        **advice,
    }
    for name in ("version", "spec", "world_size", "rank"):
        if state[name] != wanted[name]:
            raise CheckpointError(
                f"the checkpoint has {name} {state[name]!r}, and this run has {wanted[name]!r}: "
                f"{advice[name]}"
            )


def check_shapes(saved: Mapping[str, list[int]], parameters: Mapping[str, nn.Parameter]) -> None:
    """Require that a checkpoint's parameters are this model's, by name and shape.

    Raises:
        CheckpointError: naming what is missing, unknown, or of another shape.
    """
    here = shapes(parameters)
    problems = [f"'{name}' is not in the model" for name in saved if name not in here]
    problems += [f"'{name}' is not in the checkpoint" for name in here if name not in saved]
    problems += [
        f"'{name}' has shape {saved[name]} in the checkpoint and {here[name]} in the model"
        for name in here
        if name in saved and saved[name] != here[name]
    ]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(f"the checkpoint is another model's: {'; '.join(problems[:5])}{more}")


def shaped(
    parts: Iterable[tuple[str, Tensor]], parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Copies of flat per-parameter memories in their parameters' shapes, contiguous."""
    return {
        name: memory_order(parameters[name], part).clone(memory_format=torch.contiguous_format)
        for name, part in parts
    }


def flat(
    tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """The inverse of :func:`shaped`, on the parameters' devices.

    Raises:
        CheckpointError: if a memory does not have its parameter's shape.
    """
    check = {name: list(tensor.shape) for name, tensor in tensors.items()}
    check_shapes(check, {name: p for name, p in parameters.items() if name in check})
    result = {}
    for name, tensor in tensors.items():
        parameter = parameters[name]
        part = torch.empty(parameter.numel(), dtype=tensor.dtype, device=parameter.device)
        memory_order(parameter, part).copy_(tensor)
        result[name] = part
    return result


def redistribute(states: list[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """State dicts of all ranks of a run, made to fit another number of ranks.

    Every new rank gets the mean of the old memories, so the mean memory, which is what error
    feedback still owes the model, stays what it was. What owners of shards owe is divided anew.

    Args:
        states: ``state_dict()`` of every rank's handle, or LocalSGD between rounds, in any order.
        world_size: number of ranks of the new run.

    Returns:
        One state dict for each new rank, in rank order.

    Raises:
        CheckpointError: if the states are not those of all ranks of one run at one step.
    """
    _check_complete(states, world_size)
    first = states[0]
    error = {
        name: torch.stack([state["error"][name].double() for state in states])
        .mean(0)
        .to(tensor.dtype)
        for name, tensor in first["error"].items()
    }
    fresh = {**first, "world_size": world_size}
    owners = _redivided(states, world_size)
    return [
        {**fresh, "rank": rank, "error": {n: t.clone() for n, t in error.items()}, "owner": owner}
        for rank, owner in enumerate(owners)
    ]


def _redivided(states: list[dict[str, Any]], world_size: int) -> list[dict[str, Tensor]]:
    """What each of `world_size` owners owes, from what the old ones do."""
    old = sorted(states, key=lambda state: state["rank"])
    whole: dict[str, Tensor] = {}
    for name in {name for state in old for name in state["owner"]}:
        whole[name] = torch.cat([state["owner"][name] for state in old if name in state["owner"]])
    owners: list[dict[str, Tensor]] = [{} for _ in range(world_size)]
    for names in old[0]["buckets"]:
        sizes = tuple(math.prod(old[0]["shapes"][name]) for name in names)
        for owner, shard in enumerate(shards(tuple(names), sizes, world_size)):
            for name, at, size in zip(shard.names, shard.offsets, shard.sizes, strict=True):
                if name in whole:
                    owners[owner][name] = whole[name][at : at + size].clone()
    return owners


def _check_complete(states: list[dict[str, Any]], world_size: int) -> None:
    if world_size < 1:
        raise CheckpointError(f"world_size must be at least 1, not {world_size}")
    if not states:
        raise CheckpointError("no states: give the state dicts of all ranks of the old run")
    needed = (*_HEADER, "step", "shapes", "error", "buckets", "owner")
    if any(name not in state for state in states for name in needed):
        raise CheckpointError(
            f"not state dicts of a handle or of LocalSGD: each needs {', '.join(needed)}"
        )
    ranks = sorted(state["rank"] for state in states)
    expected = list(range(states[0]["world_size"]))
    if ranks != expected:
        raise CheckpointError(f"need one state of each of the ranks {expected}, and got {ranks}")
    for name in ("version", "spec", "step", "shapes", "buckets"):
        if any(state[name] != states[0][name] for state in states):
            raise CheckpointError(f"the states are not of one run at one step: their {name} differ")
    if any(state["error"].keys() != states[0]["error"].keys() for state in states):
        raise CheckpointError("the states hold error memories of different parameters")
