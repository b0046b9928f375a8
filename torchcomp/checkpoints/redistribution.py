"""Redistribution: convert the states of all ranks of a run to another number of ranks.

A run with nodes cuts every parameter into pieces, one for each rank of a node. A conversion
averages over the nodes, joins the pieces, and cuts them for the new nodes.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from torchcomp.checkpoints import checkpoint
from torchcomp.checkpoints.checkpoint import RECUT, count, listed, optional, record, require
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

    @property
    def described(self) -> str:
        where = f"position {self.position} on node {self.node} of nodes with {self.node_size} ranks"
        return "a run without nodes" if self.node_size == 1 else where

    @classmethod
    def in_order(cls, rank: int, node_size: int = 1) -> "Place":
        """Return the place of a rank, if ranks are numbered node by node."""
        return cls(rank, rank // node_size, rank % node_size, node_size)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "Place":
        """Return the place of the rank that saved a state."""
        section = state.get("two_levels")
        if section is None:
            return cls.in_order(state["rank"])
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
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"expected the result of gather_state_dict(), not {type(state).__name__}: on other "
            "ranks than dst it is None, so save it on rank dst, and load that file on all ranks"
        )
    if "states" not in state and "rank" in state:
        raise CheckpointError(
            f"this checkpoint has only the state of rank {shown(state['rank'])}, from "
            "state_dict(): pass it to load_state_dict(state) on that rank, or save "
            "gather_state_dict() instead"
        )
    _GATHERED(state, "the gathered state dict")
    states: list[State] = list(state["states"])
    if len(states) == world_size:
        own = states[place.rank]
        optional(count)(own.get("rank"), "rank")
        checkpoint.TWO_LEVELS(own.get("two_levels"), "two_levels")
        if "rank" not in own or Place.of(own) == place:
            return own
    return _cut(_joined(_complete(states)), world_size, place)


def _joined(positions: list[list[State]]) -> State:
    """Return one state for all old ranks, whose slots have whole parameters."""
    first, slots = positions[0][0], State()
    section = first.get("two_levels")
    layouts = (section or first)["parameters"]
    for slot_name, slot in first["slots"].items():
        # A cache never changes a result, so a new run can do without it.
        if slot["kind"] == Kind.CACHE.value:
            continue
        join = _joined_shards if slot["sharded"] else _mean
        parts, tensors = [join(states, slot_name) for states in positions], Tensors()
        for name in parts[0]:
            pieces = [each[name] for each in parts]
            whole = _join(layouts[name], pieces, flat=slot["sharded"])
            if whole is not None:
                tensors[name] = whole
        slots[slot_name] = {**slot, "tensors": tensors}
    # All other entries of an Averager are equal on all ranks, except for the traffic counters. Of
    # those, and of the clients' sections, rank 0's are kept.
    rest = {key: value for key, value in first.items() if key != "two_levels"}
    recut = section is not None or first.get(RECUT, False)
    return {**rest, RECUT: recut, "parameters": layouts, "slots": slots}


def _cut(whole: State, world_size: int, place: Place) -> State:
    """Return the state of a new rank, from the result of :func:`_joined`."""
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
            if flat:
                at, numel = owned[name]
                piece = piece[at : at + numel]
            # Cloned, so that the new ranks share no memory.
            tensors[name] = piece.detach().clone()
        state["slots"][slot_name] = {**slot, "tensors": tensors}
    return state


def check_place(state: Mapping[str, Any], place: Place) -> None:
    """Raise CheckpointError unless a state is of this place, with nodes of the same size."""
    checkpoint.TWO_LEVELS(state.get("two_levels"), "two_levels")
    saved = Place.of(state)
    if saved != place:
        raise CheckpointError(
            f"the checkpoint is of {saved.described}, but here is {place.described}: convert all "
            "ranks' state dicts with torchcomp.redistribute(states, world_size, nodes=...)"
        )


def two_levels(place: Place, layouts: Mapping[str, Layout]) -> State:
    """Return the section of a state on its pieces; `layouts` are those of whole parameters."""
    section = {key: value for key, value in asdict(place).items() if key != "rank"}
    return {**section, "parameters": dict(layouts)}


# --- Pieces of one parameter ---


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
    rows = torch.cat([piece.reshape(-1) for piece in pieces])[: chunk.numel]
    if flat:
        return rows
    return rows.view(layout["shape"]) if chunk.by_rows else memory_order(_like(layout), rows)


def _piece(layout: Layout, whole: Tensor, place: Place, *, flat: bool) -> Tensor | None:
    """Return one piece of a parameter; the inverse of :func:`_join`."""
    if place.node_size == 1:
        return whole
    chunk = _chunk(layout, place.node_size)
    if whole.numel() != chunk.numel:
        return None
    if not (flat or chunk.by_rows):
        ordered = whole.new_empty(chunk.numel)
        memory_order(_like(layout), ordered).copy_(whole)
        whole = ordered
    size = prod(chunk.shape)
    padded = torch.zeros(size, dtype=whole.dtype, device=whole.device)
    part = whole.reshape(-1)[place.position * size : (place.position + 1) * size]
    padded[: part.numel()] = part
    return padded if flat else padded.view(chunk.shape)


# --- States of all nodes ---


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
    """Join the shards of all nodes, in the order of memory."""
    tensors = [state["slots"][slot]["tensors"] for state in states]
    for index, (state, each) in enumerate(zip(states, tensors, strict=True)):
        saved = {name: part.numel() for name, part in each.items()}
        sizes = {name: size for name, (_, size) in _owned(states[0], len(states), index).items()}
        where = f"the server residual of rank {state['rank']}"
        require(saved == sizes, where, f"of sizes {sizes}", saved)
    # A shard is a contiguous part of a bucket. In rank order, the shards' parts of a parameter
    # therefore join to the whole parameter.
    return {
        name: torch.cat([each[name].reshape(-1) for each in tensors if name in each])
        for name in dict.fromkeys(name for each in tensors for name in each)
    }


def _owned(state: State, ranks: int, rank: int) -> dict[str, tuple[int, int]]:
    """Return the offset and the size of a rank's part of each parameter, by name."""
    owned: dict[str, tuple[int, int]] = {}
    for group in state["buckets"]:
        shapes = tuple(tuple(state["parameters"][name]["shape"]) for name in group)
        # Shards do not depend on the dtype.
        shard = BucketShape(tuple(group), shapes, torch.float32).shard(ranks, rank)
        for name, at, size in zip(shard.names, shard.offsets, shard.sizes, strict=True):
            owned[name] = at, size
    return owned


def _complete(states: list[State]) -> list[list[State]]:
    """Require the states of all ranks of one run at one step; by position, return all nodes'."""
    if not isinstance(states, list | tuple) or not states:
        raise CheckpointError("states must be a non-empty list of the state dicts of all ranks")
    for i, state in enumerate(states):
        checkpoint.HEADER(state, f"states[{i}]")
        checkpoint.ENGINE(state, f"states[{i}]")
        checkpoint.TWO_LEVELS(state.get("two_levels"), f"states[{i}].two_levels")
        checkpoint.flag(state.get(RECUT, False), f"states[{i}].{RECUT}")
    states = sorted(states, key=lambda state: state["rank"])
    first, ranks = states[0], [state["rank"] for state in states]
    size = first["world_size"]
    # The length first: a damaged world size must not make `range` huge.
    if len(ranks) != size or ranks != list(range(size)):
        raise CheckpointError(f"expected one state of each of {size} ranks, not of ranks {ranks}")
    shared = ("version", "spec", "world_size", "step", "seed", "scale", "lrs", "flushing")
    for name in (*shared, "parameters", "groups", "buckets"):
        if any(state[name] != first[name] for state in states):
            raise CheckpointError(f"the states are not of one run at one step: {name} differs")
    checkpoint.check_division("buckets", first)
    slots = [slot["tensors"] for state in states for slot in state["slots"].values()]
    if unknown := sorted({name for each in slots for name in each} - first["parameters"].keys()):
        raise CheckpointError(f"a damaged checkpoint: it lacks the shape of {listed(unknown)}")
    by_position = _by_position(states)
    kinds = [_kinds(state) for state in states]
    if any(each != kinds[0] for each in kinds):
        raise CheckpointError("the states have slots of different kinds or parameters")
    return by_position


def _by_position(states: list[State]) -> list[list[State]]:
    places = [Place.of(state) for state in states]
    found = {(each.position, each.node): state for each, state in zip(places, states, strict=True)}
    sections = [state.get("two_levels") or {} for state in states]
    layouts, size = sections[0].get("parameters", {}), min(each.node_size for each in places)
    equal = all(each.get("parameters", {}) == layouts for each in sections)
    # Compared with the number of states first: a damaged size must not make `range` huge.
    if equal and 0 < size <= len(states) and all(each.node_size == size for each in places):
        nodes = range(len(states) // size)
        grid = [[(position, node) for node in nodes] for position in range(size)]
        if found.keys() == {key for row in grid for key in row}:
            shapes = {name: list(each["shape"]) for name, each in states[0]["parameters"].items()}
            pieces = {name: _piece_layout(each, size)["shape"] for name, each in layouts.items()}
            if sections[0] and shapes != pieces:
                problem = "its parameters are not pieces of the model's"
                raise CheckpointError(f"a damaged checkpoint: {problem}")
            return [[found[key] for key in row] for row in grid]
    raise CheckpointError(
        "the states are not of one run: their nodes have other sizes or parameters, or a rank of a "
        "node is missing"
    )


def _kinds(state: Mapping[str, Any]) -> dict[str, Any]:
    kinds: dict[str, Any] = {}
    for name, slot in state["slots"].items():
        # A shard has other parameters and sizes on each rank, and a cache is dropped.
        alike = not slot["sharded"] and slot["kind"] != Kind.CACHE.value
        tensors = {n: (t.shape, t.dtype) for n, t in slot["tensors"].items()} if alike else None
        kinds[name] = slot["kind"], slot["sharded"], tensors
    return kinds
