"""States that do not fit this run, or are damaged, are refused and change nothing."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist

import torchcomp
from tests.local_sgd.script import Script, convnet
from tests.local_sgd.test_laws import OPTIONS, RUN, TOTAL
from tests.support.cases import some
from tests.support.outcomes import assert_refused, raised_by, same
from tests.support.ranks import on_threads
from torchcomp.local_sgd import Nesterov

OTHERS = [
    ({"spec": "every(4)"}, "every(4)", "qsr(alpha=0.2, h_base=2)"),
    ({"total_steps": 20}, "20", "12"),
    ({"warmup_steps": 3}, "3", "1"),
    ({"local": {"compress": "ef(topk(0.1))"}}, "ef(topk(0.1))", "compress=mean"),
    ({"local": {"outer": Nesterov(lr=0.5)}}, "nesterov(lr=0.5)", "outer=None"),
    ({"build": partial(convnet, 5)}, "0.weight", "[5, 3, 3, 3]", "[4, 3, 3, 3]"),
    ({"spec": None}, "local_sgd"),
]


@pytest.mark.parametrize("other", OTHERS)
def test_a_state_of_another_run(other):
    options, *words = other

    def body():
        foreign, script = Script(**RUN | options), Script(**RUN)
        foreign = foreign.sync or torchcomp.register(foreign.model, "mean")
        script.train(0, 1)
        before = script.sync.state_dict()
        try:
            script.sync.load_state_dict(foreign.state_dict())
        finally:
            assert same(script.sync.state_dict(), before)
            script.train(1, 3)

    assert_refused(2, body, torchcomp.CheckpointError, *words)


GONE = object()
SECTION, ROUND = ("local_sgd",), ("local_sgd", "fragments", 0)
REFERENCE = ("slots", "reference", "tensors", "0.bias")
# An entry, its new value, and what the error must name.
DAMAGES = [
    (("parameters",), {}, "0.weight"),
    (SECTION, GONE, "local_sgd"),  # as in checkpoints of earlier versions
    *(((*SECTION, key), GONE, key) for key in ("weights", "saved_by", "fragments")),
    ((*SECTION, "step"), 4.5, "step"),
    ((*SECTION, "step"), 10, "step 10"),  # beyond the round
    ((*SECTION, "syncs"), 5, "5"),  # more than steps
    ((*SECTION, "syncs"), 2, "2 synchronisations"),  # more than exchanges
    ((*SECTION, "saved_by"), [1, 2], "rank 1 of 2", "sync.next_sync"),
    (ROUND, 3, "fragments[0]"),
    ((*ROUND, "end"), 1, "'end': 1"),
    ((*ROUND, "start"), 5, "'start': 5"),
    ((*ROUND, "synced"), 5, "'synced': 5"),
    ((*ROUND, "names"), ["0.weight"], "fragments"),
    (REFERENCE, GONE, "0.bias"),
]


def changed(state, path, value):
    """A copy of the state with another value at `path`, or without that entry."""
    state = copy.deepcopy(state)
    *parents, last = path
    inner = state
    for key in parents:
        inner = inner[key]
    inner[last] = value
    if value is GONE:
        del inner[last]
    return state


@pytest.mark.parametrize("damage", some(DAMAGES, of=2))
def test_a_damaged_state_is_refused_and_the_run_continues(damage):
    path, value, *words = damage

    def body():
        script, whole = (Script(**RUN, local=OPTIONS["topk"]) for _ in range(2))
        expected, before = whole.train(0, TOTAL), script.train(0, 4)
        state = changed(script.sync.state_dict(), path, value)
        error = raised_by(lambda: script.sync.load_state_dict(state))
        return error, same([*before, *script.train(4, TOTAL)], expected)

    ((error, continued),) = on_threads(1, body)
    assert type(error) is torchcomp.CheckpointError
    assert continued
    assert [word for word in words if word not in str(error)] == []


# DDP's constructor gives rank 0's weights to all, if they are loaded before it.
@pytest.mark.parametrize(
    ("chosen", "error", "words"),
    [
        (lambda rank: 0, torchcomp.RankMismatchError, ("none on rank 0", "on ranks 1, 2")),
        (lambda rank: (rank + 1) % 3, torchcomp.CheckpointError, ()),
    ],
)
def test_weights_of_other_ranks_are_found_at_the_next_step(chosen, error, words):
    def body():
        script, again = Script(**RUN), Script(**RUN)
        script.train(0, 4)
        saved = copy.deepcopy(script.save())
        models = [None] * dist.get_world_size()
        dist.all_gather_object(models, saved["model"])
        again.load({**saved, "model": models[chosen(script.rank)]})
        untouched = again.weights()
        try:
            again.step(4)
        finally:
            assert torch.equal(again.weights(), untouched)

    assert_refused(3, body, error, "DistributedDataParallel", *words)


@pytest.mark.parametrize("cuts", [(3, 4), (3, 0)])
def test_checkpoints_of_different_steps_are_found_at_the_next_step(cuts):
    def body():
        """Each rank resumes from its own step, or starts a new run if that is 0."""
        script, again, saved = Script(**RUN), Script(**RUN), {}
        for step in range(5):
            saved[step] = copy.deepcopy(script.save())
            script.step(step)
        if cut := cuts[script.rank]:
            again.load(saved[cut])
        again.step(cut)

    words = (f"{cuts[0]} on rank 0", f"{cuts[1]} on rank 1")
    assert_refused(2, body, torchcomp.RankMismatchError, *words)
