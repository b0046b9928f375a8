"""ErrorMemory: kept by name through other layouts, and untouched by steps that do not count."""

import pytest
import torch

from torchcomp.bucket import Bucket
from torchcomp.memory import ErrorMemory
from torchcomp.state import State

SIZES = {"a": 2, "b": 3, "c": 1, "empty": 0}


def bucket(*names, dtype=torch.float32):
    sizes = tuple(SIZES[name] for name in names)
    return Bucket(names, sizes, torch.zeros(sum(sizes), dtype=dtype))


def write(memory, names, value, dtype=torch.float32):
    """One step's write, not committed yet: every element of parameter i becomes value + i."""
    _, after = memory.open(bucket(*names), dtype)
    for place, part in enumerate(after.split([SIZES[name] for name in names])):
        part.fill_(value + place)


def held(memory):
    return {name: part.tolist() for name, part in memory.items()}


@pytest.fixture
def memory():
    """A memory with one step committed: a is 1, b is 2, c is 3."""
    memory = ErrorMemory()
    write(memory, ("a", "b"), 1.0)
    write(memory, ("c",), 3.0)
    memory.commit()
    return memory


COMMITTED = {"a": [1.0] * 2, "b": [2.0] * 3, "c": [3.0]}


def test_memory_is_zero_at_the_start():
    before, after = ErrorMemory().open(bucket("a", "b"), torch.float32)
    assert before.tolist() == [0.0] * 5
    assert (after.shape, after.dtype) == (before.shape, before.dtype)


def test_commit_makes_what_was_written_the_memory(memory):
    assert held(memory) == COMMITTED
    before, _ = memory.open(bucket("a", "b"), torch.float32)
    assert before.tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]


def test_memory_before_and_after_a_step_do_not_share_elements(memory):
    before, after = memory.open(bucket("a", "b"), torch.float32)
    after.fill_(9.0)
    assert before.tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]


def test_rollback_leaves_no_trace(memory):
    write(memory, ("a", "b"), 9.0)
    memory.rollback()
    assert held(memory) == COMMITTED
    memory.commit()
    assert held(memory) == COMMITTED


def test_commit_after_a_rollback_counts_the_later_step_alone(memory):
    write(memory, ("a", "b"), 9.0)
    memory.rollback()
    write(memory, ("a", "b"), 5.0)
    memory.commit()
    assert held(memory) == COMMITTED | {"a": [5.0] * 2, "b": [6.0] * 3}


def test_commit_leaves_what_the_step_did_not_open(memory):
    write(memory, ("c",), 8.0)
    memory.commit()
    assert held(memory) == COMMITTED | {"c": [8.0]}


def test_commits_alternate_for_many_steps(memory):
    for step in range(5):
        before, after = memory.open(bucket("c"), torch.float32)
        torch.add(before, 1.0, out=after)
        memory.commit()
        assert held(memory)["c"] == [4.0 + step]


@pytest.mark.parametrize(
    "layout",
    [
        [("b", "a"), ("c",)],
        [("a",), ("b",), ("c",)],
        [("c", "b", "a")],
        [("c", "empty", "a"), ("b",)],
    ],
)
def test_memory_follows_its_names_into_another_layout(memory, layout):
    for names in layout:
        before, _ = memory.open(bucket(*names), torch.float32)
        expected = [value for name in names for value in COMMITTED.get(name, [])]
        assert before.tolist() == expected
    assert held(memory) == COMMITTED | ({"empty": []} if "empty" in str(layout) else {})


def test_parameters_outside_the_new_layout_keep_their_memory(memory):
    write(memory, ("b",), 7.0)
    memory.commit()
    assert held(memory) == COMMITTED | {"b": [7.0] * 3}


def test_a_layout_that_comes_back_finds_its_memory(memory):
    for names in [("b", "a"), ("a", "b"), ("c", "b", "a"), ("a", "b")]:
        before, after = memory.open(bucket(*names), torch.float32)
        after.copy_(before)
        memory.commit()
    assert held(memory) == COMMITTED


def test_rollback_across_a_change_of_layout_keeps_the_memory(memory):
    write(memory, ("b", "a"), 9.0)
    memory.rollback()
    assert held(memory) == COMMITTED


def test_a_step_that_was_abandoned_leaves_no_trace_in_the_next_layout(memory):
    write(memory, ("a", "b"), 9.0)
    write(memory, ("c", "b", "a"), 4.0)
    memory.commit()
    assert held(memory) == {"c": [4.0], "b": [5.0] * 3, "a": [6.0] * 2}


def test_memory_is_converted_to_the_dtype_that_is_asked_for(memory):
    before, after = memory.open(bucket("a", "b"), torch.float64)
    assert before.dtype == after.dtype == torch.float64
    assert before.tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]


def test_memory_dtype_does_not_depend_on_the_gradients_dtype():
    before, _ = ErrorMemory().open(bucket("a", dtype=torch.bfloat16), torch.float32)
    assert before.dtype == torch.float32


def test_a_parameter_can_be_kept_out_of_the_step_in_flight(memory):
    write(memory, ("a", "b"), 9.0)
    memory.keep(["a"])
    memory.commit()
    assert held(memory) == COMMITTED | {"b": [10.0] * 3}


def test_load_replaces_everything_and_fits_any_layout(memory):
    memory.load({"a": torch.full((2,), 4.0), "c": torch.full((1,), 5.0)})
    assert held(memory) == {"a": [4.0] * 2, "c": [5.0]}
    before, _ = memory.open(bucket("c", "b", "a"), torch.float32)
    assert before.tolist() == [5.0, 0.0, 0.0, 0.0, 4.0, 4.0]


def test_load_forgets_a_step_in_flight(memory):
    write(memory, ("a", "b"), 9.0)
    memory.load({"a": torch.full((2,), 4.0)})
    memory.commit()
    assert held(memory) == {"a": [4.0] * 2}


def test_scale_multiplies_laid_out_and_loaded_memory(memory):
    memory.load({"a": torch.full((2,), 4.0), "c": torch.full((1,), 5.0)})
    memory.open(bucket("c"), torch.float32)
    memory.scale(0.5)
    assert held(memory) == {"a": [2.0] * 2, "c": [2.5]}


def test_clear_forgets_everything(memory):
    write(memory, ("a", "b"), 9.0)
    memory.clear()
    memory.commit()
    assert held(memory) == {}


def test_thresholds_of_a_step_that_does_not_count_are_forgotten():
    state, ab = State(), ("a", "b")
    state.load_agreed(("c",), {0: 7})
    state.agreed(ab)[0] = 1
    state.commit()
    state.agreed(ab).update({0: 2, 1: 3})
    state.agreed(("c",))[0] = 8
    state.rollback()
    assert (state.agreed(ab), state.agreed(("c",))) == ({0: 1}, {0: 7})
    state.clear()
    state.rollback()
    assert state.agreed(ab) == {}
