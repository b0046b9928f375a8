"""State: slots follow parameter names into other buckets, and discarded steps change nothing."""

import weakref

import pytest
import torch

from torchcomp.bucket import BucketShape
from torchcomp.state import Kind, Slot, State

SIZES = {"a": 2, "b": 3, "c": 1, "empty": 0}
CPU = torch.device("cpu")


def slot(*names, dtype=torch.float32, name="error", kind=Kind.DEBT, **options):
    return Slot(name, kind, names, tuple(SIZES[n] for n in names), dtype, **options)


def write(state, names, value, **options):
    """Write a step without committing it: all elements of parameter i become value + i."""
    _, after = state.open(slot(*names, **options), CPU)
    for i, part in enumerate(after.split([SIZES[name] for name in names])):
        part.fill_(value + i)


def opened(state, *names, **options):
    """Open a slot, and return its values before the step."""
    return state.open(slot(*names, **options), CPU)[0].tolist()


def held(state, name="error"):
    return {parameter: part.tolist() for parameter, part in state.items(name)}


@pytest.fixture
def state():
    """A state after one committed step: a is 1, b is 2, c is 3."""
    state = State()
    write(state, ("a", "b"), 1.0)
    write(state, ("c",), 3.0)
    state.commit()
    return state


COMMITTED = {"a": [1.0] * 2, "b": [2.0] * 3, "c": [3.0]}


# --- Steps ----------------------------------------------------------------------------------------


def test_slot_is_zero_at_the_start():
    before, after = State().open(slot("a", "b"), CPU)
    assert before.tolist() == [0.0] * 5
    assert (after.shape, after.dtype) == (before.shape, before.dtype)


def test_slot_starts_with_the_values_of_its_init():
    def init(name, out):
        out.fill_(SIZES[name])

    assert opened(State(), "a", "c", init=init) == [2.0, 2.0, 1.0]


def test_init_is_called_only_for_new_parameters(state):
    calls = []
    init = lambda name, out: calls.append(name)  # noqa: E731
    assert opened(state, "c", "empty", "b", init=init) == [3.0, 2.0, 2.0, 2.0]
    assert calls == ["empty"]
    opened(state, "c", "empty", "b", init=init)
    assert calls == ["empty"]


def test_commit_makes_what_was_written_current(state):
    assert held(state) == COMMITTED
    assert opened(state, "a", "b") == [1.0, 1.0, 2.0, 2.0, 2.0]


def test_slot_before_and_after_a_step_do_not_share_elements(state):
    before, after = state.open(slot("a", "b"), CPU)
    after.fill_(9.0)
    assert before.tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]


def test_pending_is_what_the_step_in_flight_has_written(state):
    write(state, ("a", "b"), 9.0)
    pending = {name: part.tolist() for name, part in state.pending("error")}
    assert pending == {"a": [9.0] * 2, "b": [10.0] * 3}
    assert dict(state.pending("server_error")) == {}
    state.commit()
    assert dict(state.pending("error")) == {}


def test_rollback_changes_nothing(state):
    write(state, ("a", "b"), 9.0)
    state.rollback()
    assert held(state) == COMMITTED
    state.commit()
    assert held(state) == COMMITTED


def test_commit_after_a_rollback_applies_only_the_later_step(state):
    write(state, ("a", "b"), 9.0)
    state.rollback()
    write(state, ("a", "b"), 5.0)
    state.commit()
    assert held(state) == COMMITTED | {"a": [5.0] * 2, "b": [6.0] * 3}


def test_a_revert_after_a_rollback_does_not_undo_the_step_before(state):
    """As after Ctrl-C behind a step that a GradScaler has skipped."""
    write(state, ("a", "b"), 9.0)
    state.rollback()
    state.revert()
    assert held(state) == COMMITTED


def test_commit_leaves_what_the_step_did_not_open(state):
    write(state, ("c",), 8.0)
    state.commit()
    assert held(state) == COMMITTED | {"c": [8.0]}


def test_commits_alternate_for_many_steps(state):
    for step in range(5):
        before, after = state.open(slot("c"), CPU)
        torch.add(before, 1.0, out=after)
        state.commit()
        assert held(state)["c"] == [4.0 + step]


def test_slots_of_other_names_are_kept_apart(state):
    write(state, ("a", "b"), 7.0, name="momentum", kind=Kind.ESTIMATE)
    assert held(state, "momentum") == {"a": [0.0] * 2, "b": [0.0] * 3}
    state.commit()
    assert held(state, "momentum") == {"a": [7.0] * 2, "b": [8.0] * 3}
    assert held(state) == COMMITTED
    assert held(state, "foreign") == {}


# --- Buckets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "buckets",
    [
        [("b", "a"), ("c",)],
        [("a",), ("b",), ("c",)],
        [("c", "b", "a")],
        [("c", "empty", "a"), ("b",)],
    ],
)
def test_slot_follows_its_names_into_other_buckets(state, buckets):
    for names in buckets:
        expected = [value for name in names for value in COMMITTED.get(name, [])]
        assert opened(state, *names) == expected
    assert held(state) == COMMITTED | ({"empty": []} if "empty" in str(buckets) else {})


def test_parameters_outside_the_new_bucket_keep_their_values(state):
    write(state, ("b",), 7.0)
    state.commit()
    assert held(state) == COMMITTED | {"b": [7.0] * 3}


def test_buckets_that_come_back_have_their_values(state):
    for names in [("b", "a"), ("a", "b"), ("c", "b", "a"), ("a", "b")]:
        before, after = state.open(slot(*names), CPU)
        after.copy_(before)
        state.commit()
    assert held(state) == COMMITTED


def test_rollback_across_a_change_of_buckets_keeps_everything(state):
    write(state, ("b", "a"), 9.0)
    state.rollback()
    assert held(state) == COMMITTED


def test_an_abandoned_step_changes_nothing_in_the_next_buckets(state):
    write(state, ("a", "b"), 9.0)
    write(state, ("c", "b", "a"), 4.0)
    state.commit()
    assert held(state) == {"c": [4.0], "b": [5.0] * 3, "a": [6.0] * 2}


def test_slot_is_converted_to_a_new_dtype(state):
    before, after = state.open(slot("a", "b", dtype=torch.float64), CPU)
    assert before.dtype == after.dtype == torch.float64
    assert before.tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]


def test_a_parameter_whose_size_has_changed_gets_initial_values(state):
    other = Slot("error", Kind.DEBT, ("a", "b"), (2, 5), torch.float32)
    assert state.open(other, CPU)[0].tolist() == [1.0, 1.0] + [0.0] * 5


def test_equal_slots_are_one_layout(state):
    before, _ = state.open(slot("a", "b"), CPU)
    again, _ = state.open(slot("a", "b"), CPU)
    assert again.data_ptr() == before.data_ptr()


# --- Parameters that a step skips -----------------------------------------------------------------


@pytest.mark.parametrize("kind", [Kind.DEBT, Kind.ESTIMATE])
def test_the_step_in_flight_can_be_undone_for_a_parameter(kind):
    state = State()
    write(state, ("a", "b"), 1.0, kind=kind)
    state.commit()
    write(state, ("a", "b"), 9.0, kind=kind)
    state.undo(["a", "foreign"])
    state.commit()
    assert held(state) == {"a": [1.0] * 2, "b": [10.0] * 3}


def test_a_step_is_not_undone_in_a_cache():
    state = State()
    write(state, ("a", "b"), 1.0, kind=Kind.CACHE)
    state.undo(["a"])
    state.commit()
    assert held(state) == {"a": [1.0] * 2, "b": [2.0] * 3}


# --- Load, drop, scale ----------------------------------------------------------------------------


def test_load_replaces_the_whole_slot_and_fits_any_bucket(state):
    state.load("error", Kind.DEBT, False, {"a": torch.full((2,), 4.0), "c": torch.full((1,), 5.0)})
    assert held(state) == {"a": [4.0] * 2, "c": [5.0]}
    assert opened(state, "c", "b", "a") == [5.0, 0.0, 0.0, 0.0, 4.0, 4.0]


def test_load_discards_a_step_in_flight(state):
    write(state, ("a", "b"), 9.0)
    state.load("error", Kind.DEBT, False, {"a": torch.full((2,), 4.0)})
    state.commit()
    assert held(state) == {"a": [4.0] * 2}


def test_drop_removes_a_slot_and_its_step_in_flight(state):
    write(state, ("a", "b"), 5.0, name="momentum", kind=Kind.ESTIMATE)
    write(state, ("a", "b"), 9.0)
    state.drop(["error", "foreign"])
    state.commit()
    assert held(state) == {}
    assert state.slots() == {"momentum": (Kind.ESTIMATE, False)}
    assert held(state, "momentum") == {"a": [5.0] * 2, "b": [6.0] * 3}


@pytest.mark.parametrize(
    "remove",
    [lambda state: state.drop(["error"]), lambda state: state.open(slot("b", "a"), CPU)],
    ids=["drop", "other bucket"],
)
def test_what_is_removed_after_a_commit_leaves_the_memory(state, remove):
    copies = [weakref.ref(copy) for copy in state.open(slot("a", "b"), CPU)]
    state.commit()
    remove(state)
    assert [copy() for copy in copies] == [None, None]


def test_debts_and_estimates_are_scaled_in_buckets_and_outside(state):
    for kind in (Kind.ESTIMATE, Kind.CACHE):
        state.load(kind.value, kind, False, {"a": torch.full((2,), 4.0)})
    state.load("error", Kind.DEBT, False, {"a": torch.full((2,), 4.0), "c": torch.full((1,), 5.0)})
    opened(state, "c")
    state.scale(0.5)
    assert held(state) == {"a": [2.0] * 2, "c": [2.5]}
    assert held(state, "estimate") == {"a": [2.0] * 2}
    assert held(state, "cache") == {"a": [4.0] * 2}


def test_debts_are_the_names_of_that_kind(state):
    for kind, sharded in ((Kind.ESTIMATE, False), (Kind.CACHE, False)):
        state.load(kind.value, kind, sharded, {})
    state.load("server_error", Kind.DEBT, True, {})
    assert state.debts() == {"error", "server_error"}
    assert state.slots()["server_error"] == (Kind.DEBT, True)


# --- Several commits that are undone together -----------------------------------------------------


def commit(state, value):
    """Take a step that writes value, value + 1 and value + 2."""
    write(state, ("a", "b"), value)
    write(state, ("c",), value + 2)
    state.commit()


def test_values_from_before_several_commits_come_back(state):
    commit(state, 1.0)
    for value in (2.0, 3.0):
        state.keep_before()
        commit(state, value)
    state.revert()
    state.restore_before()
    assert held(state) == COMMITTED


@pytest.mark.parametrize("kept_again", [False, True])
def test_values_come_back_into_other_buckets(state, kept_again):
    commit(state, 1.0)
    state.keep_before()
    for value in (5.0, 6.0)[: 1 + kept_again]:
        write(state, ("c", "b"), value)  # as DDP, when it rebuilds its buckets
        write(state, ("a",), value)
        state.commit()
        if kept_again:
            state.keep_before()
    state.revert()
    state.restore_before()
    assert held(state) == COMMITTED


def test_a_parameter_whose_size_has_changed_stays_as_it_is(state):
    commit(state, 1.0)
    state.keep_before()
    larger = Slot("error", Kind.DEBT, ("c",), (2,), torch.float32)
    state.open(larger, CPU)
    state.restore_before()
    assert held(state) == COMMITTED | {"c": [0.0] * 2}


def test_forgotten_values_do_not_come_back(state):
    commit(state, 1.0)
    state.keep_before()
    commit(state, 2.0)
    now = held(state)
    state.forget_before()
    state.restore_before()
    assert held(state) == now


def test_kept_values_follow_the_loss_scale(state):
    commit(state, 1.0)
    state.keep_before()
    commit(state, 2.0)
    state.scale(4.0)
    state.revert()
    state.restore_before()
    scaled = {name: [4 * value for value in values] for name, values in COMMITTED.items()}
    assert held(state) == scaled


@pytest.mark.parametrize("void", [True, False])
def test_the_device_undoes_a_commit_and_a_second_call_cancels_that(state, void):
    commit(state, 2.0)
    after = held(state)
    state.revert_where(torch.tensor(void))
    assert held(state) == (COMMITTED if void else after)
    undone = {name: part.tolist() for name, part in state.undone("error")}
    assert undone == (after if void else COMMITTED)
    state.revert_where(torch.tensor(void))
    assert held(state) == after
    state.revert()
    assert held(state) == COMMITTED


# --- The server residual --------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_server_residual_is_added_to_the_own_residual_times_the_ranks(world_size):
    shape = BucketShape(("a", "b", "c"), ((2,), (3,), (1,)), torch.float32)
    whole = torch.zeros(6)
    for rank in range(world_size):
        state, shard = State(), shape.shards(world_size)[rank]
        write(state, ("a", "b", "c"), 1.0)
        options = {"dtype": torch.float64, "sharded": True}
        server = Slot("server_error", Kind.DEBT, shard.names, shard.sizes, **options)
        state.open(server, CPU)[1].fill_(10.0)
        state.commit()
        state.unshard([shard], world_size)
        assert set(state.slots()) == {"error"}
        error = state.open(slot("a", "b", "c"), CPU)[0]
        whole += error / world_size
    torch.testing.assert_close(whole, torch.tensor([11.0, 11.0, 12.0, 12.0, 12.0, 13.0]))


def test_without_a_server_residual_nothing_changes(state):
    shape = BucketShape(("a", "b", "c"), ((2,), (3,), (1,)), torch.float32)
    state.unshard([shape.shards(2)[0]], 2)
    assert held(state) == COMMITTED
