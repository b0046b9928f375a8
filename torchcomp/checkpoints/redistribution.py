"""Redistribution: convert the states of all ranks of a run to another number of ranks.

A conversion averages over the nodes, joins the pieces of parameters, and cuts them for new nodes.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcomp.checkpoints import checkpoint
from torchcomp.checkpoints.checkpoint import RECUT, count, listed, record, require
from torchcomp.checkpoints.pieces import Chunk, Pieces
from torchcomp.engine.bucket import BucketShape, memory_order
from torchcomp.engine.state import Kind
from torchcomp.specs.checks import is_whole, shown
from torchcomp.specs.errors import CheckpointError

State = dict[str, Any]
Tensors = dict[str, Tensor]
Layout = Mapping[str, list[int]]  # shape and strides of a parameter

_GATHERED = record(version=count, states=checkpoint.list_of(record(version=count)))


@dataclass(frozen=True)
class Place:
    """Where a rank is: on which node, and at which position within it."""

    rank: int
    node: int
    position: int
    node_size: int  # ranks of every node

    @classmethod
    def in_order(cls, rank: int, node_size: int = 1) -> "Place":
        return cls(rank, rank // node_size, rank % node_size, node_size)

    @classmethod
    def of(cls, state: Mapping[str, Any], where: str = "the state dict") -> "Place":
        checkpoint.HEADER(state, where)
        checkpoint.TWO_LEVELS(state.get("two_levels"), f"{where}.two_levels")
        section = state.get("two_levels") or asdict(cls.in_order(state["rank"]))
        return cls(state["rank"], section["node"], section["position"], section["node_size"])


def redistribute(
    states: list[State], world_size: int, nodes: int | None = None, rank: int | None = None
) -> list[State]:
    """Convert the state dicts of all ranks of a run to another number of ranks.

    Every new rank, or node, gets the mean of the old residuals and estimates: the mean residual is
    unchanged. The server residual is split into new shards.

    Args:
        states: the ``state_dict()`` of every rank, of LocalSGD between rounds, in any order.
        world_size: number of ranks of the new run.
        nodes: number of ranks of a node of the new run, numbered node by node, if it is registered
            with ``nodes=``. The old run can have other nodes, or none.
        rank: a new rank. Only its state is made, which takes the memory of one rank.

    Returns:
        One state dict for each new rank, in rank order; with `rank`, that of this rank alone.

    Raises:
        CheckpointError: if the states are not those of all ranks of one run at one step.
    """
    if not is_whole(world_size) or world_size < 1:
        raise CheckpointError(f"world_size must be at least 1, not {world_size}")
    node_size = 1 if nodes is None else nodes
    if not is_whole(node_size) or node_size < 1 or world_size % node_size:
        raise CheckpointError(f"nodes must divide world_size, {world_size}, and is {shown(nodes)}")
    if rank is not None and not (is_whole(rank) and 0 <= rank < world_size):
        raise CheckpointError(f"rank must be from 0 to {world_size - 1}, not {shown(rank)}")
    whole = _joined(_complete(states))
    # As Python's int: those of NumPy do not fit a checkpoint.
    ranks = range(world_size) if rank is None else [int(rank)]
    places = [Place.in_order(each, int(node_size)) for each in ranks]
    return [_cut(whole, int(world_size), place) for place in places]


def gathered(states: list[State]) -> State:
    """Return one state dict that contains the state dicts of all ranks, in rank order."""
    return {"version": checkpoint.VERSION, "states": states}


def own_state(state: Any, world_size: int, place: Place) -> State:
    """Return one rank's part of a :func:`gathered` state dict, converted for other ranks."""
    if isinstance(state, Mapping) and "states" not in state and "rank" in state:
        raise CheckpointError(
            f"the state_dict() of rank {shown(state['rank'])}: pass it to load_state_dict(state), "
            "or the result of gather_state_dict() on rank dst to load_gathered"
        )
    _GATHERED(state, "the gathered state dict")
    states: list[State] = list(state["states"])
    if len(states) == world_size:
        own = states[place.rank]
        if Place.of(own, f"states[{place.rank}]") == place:
            return own
    return _cut(_joined(_complete(states)), world_size, place)


def _joined(positions: list[list[State]]) -> State:
    """Return one state for all old ranks, whose slots have whole parameters."""
    first, slots = positions[0][0], State()
    section = first.get("two_levels")
    layouts = (section or first)["parameters"]
    for slot_name, slot in first["slots"].items():
        if slot["kind"] == Kind.CACHE.value:
            continue
        flat = slot["sharded"]
        parts = [(_joined_shards if flat else _mean)(states, slot_name) for states in positions]
        joined = {n: _join(layouts[n], [each[n] for each in parts], flat=flat) for n in parts[0]}
        slots[slot_name] = {**slot, "tensors": {n: t for n, t in joined.items() if t is not None}}
    # All other entries of an Averager are equal on all ranks, except for the traffic counters.
    rest = {key: value for key, value in first.items() if key != "two_levels"}
    recut = section is not None or first.get(RECUT, False)
    return {**rest, RECUT: recut, "parameters": layouts, "slots": slots}


def _cut(whole: State, world_size: int, place: Place) -> State:
    layouts, size = whole["parameters"], place.node_size
    state = {**whole, "world_size": world_size, "rank": place.rank}
    state[RECUT] |= size > 1
    if size > 1:
        state["parameters"] = {name: _piece_layout(each, size) for name, each in layouts.items()}
        state["two_levels"] = two_levels(place, layouts)
    owned = _owned(state, world_size // size, place.node)
    state["slots"] = {}
    for slot_name, slot in whole["slots"].items():
        flat, tensors = slot["sharded"], Tensors()
        for name, value in slot["tensors"].items():
            piece = _piece(layouts[name], value, place, flat=flat)
            if piece is None or (flat and name not in owned):
                continue
            # Cloned, so that the new ranks share no memory.
            tensors[name] = (piece[owned[name]] if flat else piece).detach().clone()
        state["slots"][slot_name] = {**slot, "tensors": tensors}
    return state


def check_place(state: Mapping[str, Any], place: Place) -> None:
    """Raise CheckpointError unless a state is of this place, with nodes of the same size."""
    if (saved := Place.of(state)) != place:
        raise CheckpointError(
            f"the checkpoint is of {saved}, but here is {place}: convert all ranks' state dicts "
            "with torchcomp.redistribute(states, world_size, nodes=...)"
        )


def two_levels(place: Place, layouts: Mapping[str, Layout]) -> State:
    """Return the section of a state on its pieces, from the layouts of the whole."""
    section = {key: value for key, value in asdict(place).items() if key != "rank"}
    return {**section, "parameters": dict(layouts)}


def _like(layout: Layout) -> Tensor:
    try:
        return torch.empty_strided(layout["shape"], layout["stride"], device="meta")
    except RuntimeError as error:
        raise CheckpointError(f"a damaged checkpoint: no parameter has {layout}") from error


def _chunk(layout: Layout, ranks: int) -> Chunk:
    return Pieces(BucketShape.of(("",), {"": _like(layout)}), ranks).chunks[0]


def _piece_layout(layout: Layout, ranks: int) -> dict[str, list[int]]:
    chunk = _chunk(layout, ranks)
    return {"shape": list(chunk.shape), "stride": list(chunk.stride)}


def _join(layout: Layout, pieces: list[Tensor], *, flat: bool) -> Tensor | None:
    """Join the pieces of a parameter, or return None if they have no value for each element."""
    if len(pieces) == 1:
        return pieces[0]
    chunk = _chunk(layout, len(pieces))
    if pieces[0].numel() != prod(chunk.shape):
        return None
    rows = torch.cat([piece.reshape(-1) for piece in pieces])[: prod(layout["shape"])]
    if flat:
        return rows
    return rows.view(layout["shape"]) if chunk.by_rows else memory_order(_like(layout), rows)


def _piece(layout: Layout, whole: Tensor, place: Place, *, flat: bool) -> Tensor | None:
    if place.node_size == 1:
        return whole
    chunk, numel = _chunk(layout, place.node_size), prod(layout["shape"])
    if whole.numel() != numel:
        return None
    if not (flat or chunk.by_rows):
        ordered = whole.new_empty(numel)
        memory_order(_like(layout), ordered).copy_(whole)
        whole = ordered
    size = prod(chunk.shape)
    part = whole.reshape(-1)[place.position * size : (place.position + 1) * size]
    padded = pad(part, (0, size - part.numel()))
    return padded if flat else padded.view(chunk.shape)


def _mean(states: list[State], slot: str) -> Tensors:
    first, *others = (state["slots"][slot]["tensors"] for state in states)
    means = Tensors()
    for name, value in first.items():
        # In float64: the sum of 16-bit residuals can exceed their range.
        total = value.to(torch.float64, copy=True)
        for each in others:
            total += each[name]
        means[name] = total.div_(len(states)).to(value.dtype)
    return means


def _joined_shards(states: list[State], slot: str) -> Tensors:
    tensors = [state["slots"][slot]["tensors"] for state in states]
    for index, (state, each) in enumerate(zip(states, tensors, strict=True)):
        saved = {name: part.numel() for name, part in each.items()}
        sizes = {
            n: own.stop - own.start for n, own in _owned(states[0], len(states), index).items()
        }
        where = f"the server residual of rank {state['rank']}"
        require(saved == sizes, where, f"of sizes {sizes}", saved)
    # A shard is a contiguous part of a bucket, so its parts join in rank order.
    names = dict.fromkeys(name for each in tensors for name in each)
    return {n: torch.cat([each[n].reshape(-1) for each in tensors if n in each]) for n in names}


def _owned(state: State, ranks: int, rank: int) -> dict[str, slice]:
    """Return a rank's part of each parameter, by name."""
    owned: dict[str, slice] = {}
    for group in state["buckets"]:
        shapes = tuple(tuple(state["parameters"][name]["shape"]) for name in group)
        shard = BucketShape(tuple(group), shapes, torch.float32).shard(ranks, rank)
        for name, at, size in zip(shard.names, shard.offsets, shard.sizes, strict=True):
            owned[name] = slice(at, at + size)
    return owned


def _complete(states: list[State]) -> list[list[State]]:
    """Require the states of all ranks of one run at one step; by position, return all nodes'."""
    if not isinstance(states, list | tuple) or not states:
        raise CheckpointError("states must be a non-empty list of the state dicts of all ranks")
    for i, state in enumerate(states):
        Place.of(state, f"states[{i}]")
        checkpoint.ENGINE(state, f"states[{i}]")
        checkpoint.flag(state.get(RECUT, False), f"states[{i}].{RECUT}")
    states = sorted(states, key=lambda state: state["rank"])
    first, ranks = states[0], [state["rank"] for state in states]
    size = first["world_size"]
    if len(ranks) != size or ranks != list(range(size)):
        raise CheckpointError(f"expected one state of each of {size} ranks, not of ranks {ranks}")
    common = [_common(state) for state in states]
    for name, value in common[0].items():
        if any(each[name] != value for each in common):
            raise CheckpointError(f"the states are not of one run at one step: {name} differs")
    checkpoint.check_division("buckets", first)
    slots = [slot["tensors"] for state in states for slot in state["slots"].values()]
    if unknown := sorted({name for each in slots for name in each} - first["parameters"].keys()):
        raise CheckpointError(f"a damaged checkpoint: it lacks the shape of {listed(unknown)}")
    return _by_position(states)


def _common(state: State) -> dict[str, Any]:
    section = state.get("two_levels") or {}
    shared = ("version", "spec", "world_size", "step", "seed", "scale", "lrs", "flushing")
    slots = {}
    for name, slot in state["slots"].items():
        # A shard has other parameters and sizes on each rank, and a cache is dropped.
        alike = not slot["sharded"] and slot["kind"] != Kind.CACHE.value
        shapes = {n: (t.shape, t.dtype) for n, t in slot["tensors"].items() if alike}
        slots[name] = slot["kind"], slot["sharded"], shapes
    common = {name: state[name] for name in (*shared, "parameters", "groups", "buckets")}
    nodes = section.get("node_size"), section.get("parameters")
    return {**common, "nodes": nodes, "slots": slots}


def _by_position(states: list[State]) -> list[list[State]]:
    places, section = [Place.of(state) for state in states], states[0].get("two_levels")
    found = {(each.position, each.node): state for each, state in zip(places, states, strict=True)}
    # A damaged size must not make `range` huge.
    size = min(places[0].node_size, len(states))
    rows = [[(at, node) for node in range(len(states) // max(size, 1))] for at in range(size)]
    if found.keys() != {key for row in rows for key in row}:
        raise CheckpointError("the states are not of one run: a rank of a node is missing")
    if section is not None:
        shapes = {name: list(each["shape"]) for name, each in states[0]["parameters"].items()}
        pieces = {n: _piece_layout(x, size)["shape"] for n, x in section["parameters"].items()}
        require(pieces == shapes, "two_levels", "of pieces of the parameters", pieces)
    return [[found[key] for key in row] for row in rows]
