"""Redistribution between nodes: pieces of parameters are joined and cut again."""

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.mutations import at, paths, replaced
from tests.support.outcomes import caught, reloaded, same
from torchcomp import CheckpointError, redistribute
from torchcomp.checkpoints import checkpoint
from torchcomp.checkpoints.pieces import Pieces
from torchcomp.checkpoints.redistribution import Place, check_place, gathered, own_state, two_levels
from torchcomp.checkpoints.resume import load_slots, save_slots
from torchcomp.engine.bucket import Bucket, BucketShape
from torchcomp.engine.state import Kind, Slot

Tensors = dict[str, Tensor]
Run = tuple[int, int]
"""Number of nodes, and of ranks of a node."""


def model() -> Tensors:
    """Parameters in all memory formats, none of which has a number of rows that 2 or 3 divides."""
    return {
        "odd": torch.zeros(7, 2),
        "conv": torch.zeros(5, 3, 2, 2).to(memory_format=torch.channels_last),
        "transposed": torch.zeros(4, 5).t(),
        "sliced": torch.zeros(5, 6)[:, ::2],
        "scalar": torch.zeros(()),
        "empty": torch.zeros(0, 3),
        "one": torch.zeros(1, 4),
    }


def drawn(seed: int) -> Tensors:
    """A value for each element of the model. Means of a few of them are exact."""
    noise = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(-999, 999, parameter.shape, generator=noise) * 12.0
        for name, parameter in model().items()
    }


class Node:
    """What the ranks of one node save: the residual of the node, and the server's of all nodes."""

    def __init__(
        self, node: int, run: Run, error: Tensors, server: Tensors, dtype: Any = torch.float32
    ) -> None:
        self.node, (self.nodes, self.size), self.dtype = node, run, dtype
        self.parameters = model()
        self.pieces = Pieces(BucketShape.of(self.parameters, self.parameters), self.size)
        self.error, self.server = self._cut(error), self._cut(server)
        self.own = self.parameters  # the piece of a rank
        if self.size > 1:
            whole = {n: BucketShape.of((n,), self.parameters) for n in self.parameters}
            self.own = {n: Pieces(whole[n], self.size).like(p) for n, p in self.parameters.items()}

    def _cut(self, values: Tensors) -> Tensor:
        """The piece of each rank, as the rows of a matrix."""
        bucket = Bucket.read(self.pieces.whole, values)
        out = bucket.flat.new_empty(self.size * self.pieces.piece.numel)
        return self.pieces.cut(bucket.parts(), out).view(self.size, -1)

    def slots(self, position: int) -> dict[str, Any]:
        shape = BucketShape.of(self.own, self.own)
        shard = shape.shards(self.nodes)[self.node]
        mine = torch.split(self.server[position][shard.span], list(shard.sizes))
        held = {
            "error": Bucket(shape, self.error[position].to(self.dtype)).parts(),
            "server_error": dict(zip(shard.names, mine, strict=True)),
        }
        slots = [
            Slot("error", Kind.DEBT, shape.names, shape.sizes, self.dtype),
            Slot("server_error", Kind.DEBT, shard.names, shard.sizes, torch.float32, True),
        ]
        return save_slots(slots, SimpleNamespace(items=lambda name: held[name].items()), self.own)

    def state(self, position: int, rank: int | None = None) -> dict[str, Any]:
        rank = self.node * self.size + position if rank is None else rank
        run = SimpleNamespace(rank=rank, world_size=self.nodes * self.size)
        state = checkpoint.header("mean", run) | {"step": 10, "seed": 0, "scale": 1.0, "lrs": {}}
        state |= {"flushing": False, "slots": self.slots(position)}
        state |= {division: [list(self.parameters)] for division in ("groups", "buckets")}
        state["parameters"] = checkpoint.layout_of(self.own)
        counters = ("sent", "received", "dense", "control", "inside")
        state["traffic"] = {name: number for number, name in enumerate(counters)}
        if self.size > 1:
            place = Place(rank, self.node, position, self.size)
            state["two_levels"] = two_levels(place, checkpoint.layout_of(self.parameters))
        return state


def states_of(run: Run, errors: list[Tensors], server: Tensors, **options: Any) -> list[Any]:
    """The states of all ranks, in rank order. `errors` has one entry for each node."""
    nodes, size = run
    return [
        Node(node, run, errors[node], server, **options).state(position)
        for node in range(nodes)
        for position in range(size)
    ]


def mean(errors: list[Tensors]) -> Tensors:
    return {
        name: torch.stack([each[name] for each in errors]).double().mean(0).float()
        for name in errors[0]
    }


def converted(states: list[Any], run: Run, rank: int | None = None) -> list[Any]:
    nodes, size = run
    return redistribute(states, nodes * size, size if size > 1 else None, rank)


RUNS = st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (3, 2), (1, 8), (4, 4), (40, 1)])


@given(RUNS, RUNS, st.integers(0, 99), st.randoms(use_true_random=False))
def test_every_new_rank_has_its_piece_of_the_mean_over_the_nodes(
    before: Run, after: Run, seed: int, random: Any
) -> None:
    nodes, size = before
    errors, server = [drawn(seed + node) for node in range(nodes)], drawn(seed + 100)
    places = [(node, position) for node in range(nodes) for position in range(size)]
    if size > 1:  # a mesh can place any rank anywhere
        random.shuffle(places)
    states = [
        Node(node, before, errors[node], server).state(position, rank)
        for rank, (node, position) in enumerate(places)
    ]
    found = converted([*reversed(states)], after)
    wanted = states_of(after, [mean(errors)] * after[0], server)
    assert len(found) == len(wanted)
    for state, expected in zip(found, wanted, strict=True):
        for key in ("rank", "world_size", "parameters", "two_levels", "slots", "step", "buckets"):
            assert same(state.get(key), expected.get(key)), key


def test_new_states_share_no_memory_and_can_be_saved() -> None:
    states = states_of((2, 2), [drawn(0), drawn(1)], drawn(2))
    before = copy.deepcopy(states)
    for run in ((1, 1), (2, 2), (4, 1)):
        found = converted(states, run)
        assert all(map(same, reloaded(found), found))
        slots = [slot for state in found for slot in state["slots"].values()]
        for tensor in (tensor for slot in slots for tensor in slot["tensors"].values()):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
            tensor.fill_(-1)
    assert same(states, before)


def test_a_cache_is_dropped() -> None:
    cache = {"kind": "cache", "sharded": False, "tensors": {"odd": torch.zeros(7, 2)}}
    states = [changed(state, ("slots", "cache"), cache) for state in TWO]
    for run in ((1, 1), (2, 2)):
        assert all("cache" not in state["slots"] for state in converted(states, run))


def with_basis(run: Run) -> list[Any]:
    """States with the start of PowerSGD's iteration, a vector for some parameters."""
    states = states_of(run, [drawn(0)] * run[0], drawn(1))
    for rank, state in enumerate(states):
        tensors = {"odd": torch.full((2,), float(rank)), "conv": torch.ones(12)}
        state["slots"]["q"] = {"kind": "estimate", "sharded": False, "tensors": tensors}
    return states


def loaded(state: Any, slot: str, *names: str, size: int, model: Tensors) -> dict[str, list[Any]]:
    """What a run loads from a slot. It begins new values with fives."""
    kind, sizes = Kind(state["slots"][slot]["kind"]), (size,) * len(names)
    fives = lambda name, out: out.fill_(5.0)  # noqa: E731
    declared = Slot(slot, kind, names, sizes, torch.float32, init=fives)
    kept = {name: t for name, t in state["slots"][slot]["tensors"].items() if name in names}
    only = {slot: state["slots"][slot] | {"tensors": kept}}
    parts = load_slots([declared], state | {"slots": only}, model, "a method")[slot][2]
    return {name: part.tolist() for name, part in parts.items()}


@pytest.mark.parametrize(
    ("before", "after"), [((2, 1), (2, 2)), ((2, 2), (2, 1)), ((2, 2), (1, 4)), ((1, 2), (3, 2))]
)
def test_they_begin_anew_on_other_pieces(before: Run, after: Run) -> None:
    for state in converted(with_basis(before), after):
        model = Node(0, after, drawn(0), drawn(1)).own
        found = loaded(state, "q", "odd", "one", size=3, model=model)
        assert found == {"odd": [5.0] * 3, "one": [5.0] * 3}


def test_they_are_averaged_without_nodes_and_a_missing_residual_is_refused() -> None:
    for state in converted(with_basis((2, 1)), (3, 1)):
        assert loaded(state, "q", "odd", size=2, model=model()) == {"odd": [0.5, 0.5]}
        with pytest.raises(CheckpointError, match="lacks 'one'"):
            loaded(state, "q", "one", size=3, model=model())
    (state,) = converted(with_basis((1, 2)), (1, 1))
    del state["slots"]["error"]["tensors"]["odd"]
    with pytest.raises(CheckpointError, match="lacks 'odd'"):
        loaded(state, "error", "odd", size=14, model=model())


GARBAGE = [None, -1, 0, 1, 2, 7, 2**63 - 1, 2**70, 1.5, "2", [], [1], [2**62] * 3, {}, {"node": 1}]


DELETED = object()


def changed(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of a state with another value at a path, or without it."""
    *outer, last = path
    parent = copy.copy(at(state, outer))
    parent[last] = value
    if value is DELETED:
        del parent[last]
    return replaced(state, outer, parent)


WHOLE = states_of((2, 2), [drawn(0), drawn(1)], drawn(2))
ODD = ("slots", "error", "tensors", "odd")
OTHERS = [("recut",), ("rank",), ("world_size",), ("slots",), ODD]
DAMAGE = [(key, *p) for key in ("two_levels", "parameters") for p in paths(WHOLE[0][key])]


@given(
    st.sampled_from(DAMAGE + OTHERS),
    st.sampled_from([*GARBAGE, DELETED]),
    st.sets(st.integers(0, 3), min_size=1),
    st.sampled_from([(1, 1), (2, 2), (1, 3)]),
)
def test_damage_raises_nothing_but_a_checkpoint_error(
    path: tuple[Any, ...], value: Any, ranks: set[int], after: Run
) -> None:
    states = list(WHOLE)
    for rank in ranks:
        if path != ("recut",) or value is not DELETED:
            states[rank] = changed(states[rank], path, value)
    error, *others = (
        caught(lambda: converted(states, after)),
        caught(lambda: own_state(gathered(states), 4, Place.in_order(1, 2))),
        caught(lambda: check_place(states[0], Place.in_order(0, 2))),
    )
    assert {type(each) for each in (error, *others)} <= {CheckpointError, type(None)}
    # A state that is accepted lost no residual.
    if error is None and path != ("recut",):
        expected = converted(WHOLE, after)
        for state, wanted in zip(converted(states, after), expected, strict=True):
            assert same(state["slots"], wanted["slots"])


TWO = states_of((2, 1), [drawn(0), drawn(1)], drawn(2))
NEW = {"kind": "debt", "sharded": False, "tensors": {"new": torch.zeros(1)}}
FIRST_SHARD = ("slots", "server_error", "tensors", "odd")


@pytest.mark.parametrize(
    ("states", "problem"),
    [
        ([], r"^states\b"),
        (TWO[:1], r"\b2 ranks.* \[0\]"),
        ([changed(TWO[0], ("world_size",), 2**62), TWO[1]], rf"\b{2**62} ranks.* \[0, 1\]"),
        ([TWO[0], changed(TWO[1], ("scale",), 2.0)], r": scale\b"),
        ([TWO[0], changed(TWO[1], ("parameters",), {})], r": parameters\b"),
        ([TWO[0], changed(TWO[1], ODD, DELETED)], "slots"),
        ([changed(state, ("buckets",), [["foreign"]]) for state in TWO], "'foreign'"),
        ([changed(state, ("slots", "q"), NEW) for state in TWO], "'new'"),
        ([changed(TWO[0], FIRST_SHARD, torch.zeros(3)), TWO[1]], "rank 0"),
        ([changed(WHOLE[0], ("two_levels", "position"), 1), *WHOLE[1:]], "node"),
        ([*WHOLE[:3], changed(WHOLE[3], ("two_levels", "node_size"), 4)], "node"),
        ([*states_of((4, 1), [drawn(0)] * 4, drawn(1))[:2], *WHOLE[2:]], "run"),
    ],
    ids=range(12),
)
def test_states_that_are_not_all_ranks_of_one_run_are_refused(states: Any, problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        redistribute(states, 2)


@pytest.mark.parametrize(
    ("dtype", "values", "mean"),
    [(torch.float16, (60_000.0, 50_016.0), 55_008.0), (torch.float32, (1e8, 1.5, -1e8), 0.5)],
)
def test_means_are_summed_in_float64(dtype: torch.dtype, values: Any, mean: float) -> None:
    drawns = [{**drawn(0), "scalar": torch.tensor(value)} for value in values]
    states = states_of((len(values), 1), drawns, drawn(1), dtype=dtype)
    (after,) = (state["slots"]["error"]["tensors"]["scalar"] for state in redistribute(states, 1))
    assert (after.dtype, after.item()) == (dtype, mean)


def test_a_server_residual_of_another_world_size_or_memory_order_is_refused() -> None:
    here = model()
    other = here | {"odd": here["odd"].t().contiguous().t()}
    only = TWO[0] | {"slots": {"server_error": TWO[0]["slots"]["server_error"]}}

    def load(nodes: int, parameters: Tensors) -> Any:
        shard = BucketShape.of(here, here).shards(nodes)[0]
        slot = Slot("server_error", Kind.DEBT, shard.names, shard.sizes, torch.float32, True)
        return load_slots([slot], only, parameters, "a method")

    load(2, here)
    for nodes, parameters, problem in ((3, here, "server_error"), (2, other, r"'odd' .*\[1, 7\]")):
        with pytest.raises(CheckpointError, match=problem):
            load(nodes, parameters)


def test_a_bad_argument_is_refused_by_its_name() -> None:
    bad = {"nodes": (0, 3, 8, 1.0, True, "2"), "rank": (-1, 4, "2"), "world_size": (0, True)}
    for field, value in [(name, each) for name, values in bad.items() for each in values]:
        with pytest.raises(CheckpointError, match=field):
            redistribute(WHOLE, **{"world_size": 4, field: value})


@given(RUNS, RUNS)
def test_the_state_of_one_new_rank_is_that_among_all(before: Run, after: Run) -> None:
    states = states_of(before, [drawn(node) for node in range(before[0])], drawn(50))
    for rank, wanted in enumerate(converted(states, after)):
        (found,) = converted(states, after, rank)
        assert same(found, wanted)
    # It takes no longer among more, and numbers of NumPy give states that can be saved.
    assert redistribute(WHOLE, 10**12, rank=5)[0]["world_size"] == 10**12
    (numpys,) = redistribute(WHOLE, np.int64(4), np.int64(2), np.int64(1))
    assert same(reloaded(numpys), numpys)


def test_a_gathered_state_is_converted_only_if_the_place_is_another_one() -> None:
    whole, flat = gathered(WHOLE), converted(WHOLE, (4, 1))
    for rank in range(4):
        assert own_state(whole, 4, Place.in_order(rank, 2)) is WHOLE[rank]
    # The same number of ranks on other nodes, and numbered in another way.
    assert same(own_state(whole, 4, Place.in_order(3)), flat[3])
    # Ranks 1 and 2 have changed their places: rank 1 is the first one of the second node.
    found = own_state(whole, 4, Place(1, 1, 0, 2))
    assert found["rank"] == 1
    assert same(found["slots"], converted(WHOLE, (2, 2))[2]["slots"])
    # Without a conversion, another place is refused.
    check_place(WHOLE[3], Place.in_order(3, 2))
    for place in (Place.in_order(3), Place(3, 1, 0, 2), Place(3, 0, 1, 2), Place.in_order(3, 4)):
        with pytest.raises(CheckpointError, match="redistribute"):
            check_place(WHOLE[3], place)
