"""State: slots follow parameter names into other buckets, and discarded steps change nothing."""

import weakref

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from torchcomp.engine.state import Kind, Slot, State, Units

SIZES = {"a": 2, "b": 3, "c": 1, "empty": 0}
CPU = torch.device("cpu")


def slot(*names, dtype=torch.float32, name="error", kind=Kind.DEBT, **options):
    return Slot(name, kind, names, tuple(SIZES[n] for n in names), dtype, **options)


def write(state, names, value, **options):
    """Write a step without committing it: all elements of parameter i become value + i."""
    _, after = state.open(slot(*names, **options), CPU)
    for i, part in enumerate(after.split([SIZES[name] for name in names])):
        part.fill_(value + i)


def held(parts):
    return {parameter: part.tolist() for parameter, part in parts}


# --- Any sequence of calls, against a dict of numbers ---------------------------------------------

BUCKETS = [[("a", "b"), ("c",)], [("b", "a"), ("c",)], [("c", "b", "a")], [("a",), ("c", "b")]]
KINDS = {"error": Kind.DEBT, "momentum": Kind.ESTIMATE, "thresholds": Kind.CACHE}
NUMBERS = st.integers(1, 9).map(float)
PARAMETERS = st.sets(st.sampled_from("abc"))
Values = dict[str, dict[str, float]]


def copied(values: Values) -> Values:
    return {name: dict(parts) for name, parts in values.items()}


class Machine(RuleBasedStateMachine):
    """A state, and what each parameter must have in each slot."""

    def __init__(self):
        super().__init__()
        self.state = State()
        self.now: Values = {name: {} for name in KINDS}
        self.kept: Values = copied(self.now)
        self.written: Values | None = None  # by the step in flight
        self.wrote: set[str] = set()  # slots that it has opened
        self.committed: set[str] = set()  # slots that the last commit has changed
        self.before: Values | None = None  # what a revert brings back, if it is legal

    @rule(buckets=st.sampled_from(BUCKETS), names=st.sets(st.sampled_from([*KINDS])), value=NUMBERS)
    def step(self, buckets, names, value):
        self.state.rollback()
        self.written, self.before, self.wrote, self.committed = copied(self.now), None, names, set()
        for name in sorted(names):
            for names_of in buckets:
                write(self.state, names_of, value, name=name, kind=KINDS[name])
                for i, parameter in enumerate(names_of):
                    self.now[name].setdefault(parameter, 0.0)
                    self.written[name][parameter] = value + i

    @precondition(lambda self: self.written is not None)
    @rule(names=PARAMETERS)
    def undo(self, names):
        self.state.undo([*names, "foreign"])
        for name in ("error", "momentum"):
            for parameter in names & self.written[name].keys():
                self.written[name][parameter] = self.now[name][parameter]

    @precondition(lambda self: self.written is not None)
    @rule()
    def commit(self):
        self.state.commit()
        self.now, self.before, self.written = self.written, self.now, None
        self.committed = self.wrote

    @rule()
    def rollback(self):
        self.state.rollback()
        self.written, self.before, self.committed = None, copied(self.now), set()  # no older commit

    @precondition(lambda self: self.before is not None)
    @rule()
    def revert(self):
        self.state.revert()
        self.now, self.before, self.committed = self.before, None, set()

    @precondition(lambda self: self.committed)
    @rule()
    def keep_before(self):
        self.state.keep_before()
        for name in self.committed:
            self.kept[name] = self.before[name] | self.kept[name]

    @precondition(lambda self: self.written is None)
    @rule(restores=st.booleans())
    def end_of_several_steps(self, restores):
        self.state.restore_before() if restores else self.state.forget_before()
        for name, parts in self.kept.items() if restores else ():
            self.now[name] |= {p: v for p, v in parts.items() if p in self.now[name]}
        self.kept, self.before, self.committed = {name: {} for name in KINDS}, None, set()

    @precondition(lambda self: self.written is None)
    @rule(factor=st.sampled_from([0.5, 2.0]), parameters=st.none() | PARAMETERS)
    def scale(self, factor, parameters):
        if parameters is None:
            Units().rescale(self.state, factor)
        else:
            self.state.scale_debts(dict.fromkeys(parameters, factor))
        for name in ("error", "momentum")[: 2 if parameters is None else 1]:
            for values in (self.now[name], self.kept[name]):
                for parameter in values if parameters is None else parameters & values.keys():
                    values[parameter] *= factor
        self.before, self.committed = None, set()

    @precondition(lambda self: self.written is None)
    @rule(name=st.sampled_from([*KINDS]), parameters=PARAMETERS, value=NUMBERS, drops=st.booleans())
    def load(self, name, parameters, value, drops):
        loaded = {each: torch.full((SIZES[each],), value) for each in parameters}
        if drops:
            self.state.drop([name, "foreign"])
        else:
            self.state.load(name, KINDS[name], False, loaded)
        self.now[name], self.kept[name] = {} if drops else dict.fromkeys(parameters, value), {}
        self.before, self.committed = None, set()

    @invariant()
    def every_slot_has_its_values(self):
        for name, parts in self.now.items():
            expected = {each: [value] * SIZES[each] for each, value in parts.items()}
            assert held(self.state.items(name)) == expected
        assert held(self.state.items("foreign")) == {}


TestAnyCalls = Machine.TestCase
TestAnyCalls.settings = settings(
    max_examples=50, stateful_step_count=20, deadline=None, derandomize=True
)


# --- What the machine does not do -----------------------------------------------------------------


@pytest.fixture
def state():
    """A state after one committed step: a is 1, b is 2, c is 3."""
    state = State()
    write(state, ("a", "b"), 1.0)
    write(state, ("c",), 3.0)
    state.commit()
    return state


COMMITTED = {"a": [1.0] * 2, "b": [2.0] * 3, "c": [3.0]}


def test_new_parameters_start_with_zeros_or_the_values_of_init(state):
    calls = []

    def init(name, out):
        calls.append(name)
        out.fill_(SIZES[name])

    def opened(state, *names, **options):
        return state.open(slot(*names, **options), CPU)[0].tolist()

    assert opened(State(), "a", "b") == [0.0] * 5
    assert opened(State(), "a", "c", init=init) == [2.0, 2.0, 1.0]
    for _ in range(2):
        assert opened(state, "c", "empty", "b", init=init) == [3.0, 2.0, 2.0, 2.0]
    assert calls == ["a", "c", "empty"]


def test_slot_is_converted_to_a_new_dtype_and_size(state):
    before, after = state.open(slot("a", "b", dtype=torch.float64), CPU)
    assert before.dtype == after.dtype == torch.float64
    assert before.tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]
    other = Slot("error", Kind.DEBT, ("a", "b"), (2, 5), torch.float32)
    assert state.open(other, CPU)[0].tolist() == [1.0, 1.0] + [0.0] * 5


def test_a_parameter_whose_size_has_changed_is_not_restored(state):
    write(state, ("c",), 7.0)
    state.commit()
    state.keep_before()
    state.open(Slot("error", Kind.DEBT, ("c",), (2,), torch.float32), CPU)
    state.restore_before()
    assert held(state.items("error")) == COMMITTED | {"c": [0.0] * 2}


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
