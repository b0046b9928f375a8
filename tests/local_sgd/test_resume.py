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
from torchcomp.checkpoints.checkpoint import VERSION
from torchcomp.local_sgd import Nesterov

# --- Another run ----------------------------------------------------------------------------------

OTHERS = [
    ({"spec": "every(4)"}, "every(4)", "qsr(alpha=0.2, h_base=2)"),
    ({"total_steps": 20}, "20", "12"),
    ({"warmup_steps": 3}, "3", "1"),
    ({"local": {"compress": "ef(topk(0.1))"}}, "ef(topk(0.1))", "compress=mean"),
    ({"local": {"outer": Nesterov(lr=0.5)}}, "nesterov(lr=0.5)", "outer=None"),
    ({"local": {"moments": "reset"}}, "moments=reset", "moments=local"),
    ({"local": {"fragments": 2}}, "fragments=2", "fragments=1"),
    ({"build": partial(convnet, 5)}, "0.weight", "[5, 3, 3, 3]", "[4, 3, 3, 3]"),
]


@pytest.mark.parametrize("other", OTHERS)
def test_a_state_of_another_run(other):
    options, *words = other

    def body():
        foreign, script = Script(**RUN | options), Script(**RUN)
        script.train(0, 1)
        before = script.sync.state_dict()
        try:
            script.sync.load_state_dict(foreign.sync.state_dict())
        finally:
            assert same(script.sync.state_dict(), before)
            script.train(1, 3)

    assert_refused(2, body, torchcomp.CheckpointError, *words)


def test_a_state_of_a_registered_model():
    def body():
        state = torchcomp.register(Script(spec=None).model, "mean").state_dict()
        Script(**RUN).sync.load_state_dict(state)

    assert_refused(1, body, torchcomp.CheckpointError, "local_sgd")


# --- Damage ---------------------------------------------------------------------------------------

GONE = object()
SECTION, ROUND = ("local_sgd",), ("local_sgd", "fragments", 0)
REFERENCE = ("slots", "reference", "tensors", "0.bias")
NAN = torch.tensor(float("nan"), dtype=torch.float64)
# An entry, its new value, and what the error must name.
DAMAGES = [
    (("rank",), GONE, "rank"),
    (("rank",), 7, "7"),
    (("world_size",), 64, "64", "1"),
    (("version",), 99, "99", str(VERSION)),
    (("parameters",), {}, "0.weight"),
    (SECTION, GONE, "local_sgd"),  # as in checkpoints of earlier versions
    (SECTION, [1], "local_sgd"),
    *(((*SECTION, key), GONE, key) for key in ("weights", "saved_by", "fragments")),
    ((*SECTION, "schedule"), "every(7)", "every(7)", "qsr("),
    ((*SECTION, "step"), "4", "step"),
    ((*SECTION, "step"), -1, "step"),
    ((*SECTION, "step"), 4.5, "step"),
    ((*SECTION, "step"), 10, "step 10"),  # beyond the round
    ((*SECTION, "syncs"), 5, "5"),  # more than steps
    ((*SECTION, "syncs"), 2, "syncs"),  # more than exchanges
    ((*SECTION, "saved_by"), [0], "saved_by"),
    ((*SECTION, "saved_by"), [1, 2], "rank 1 of 2"),  # inside a round
    ((*SECTION, "fragments"), [], "fragments=0"),
    (ROUND, 3, "fragments[0]"),
    ((*ROUND, "end"), GONE, "end"),
    ((*ROUND, "end"), 1, "'end': 1"),
    ((*ROUND, "start"), 5, "'start': 5"),
    ((*ROUND, "synced"), 5, "'synced': 5"),
    ((*ROUND, "lrs"), [float("nan")], "lrs"),
    ((*ROUND, "lr_sum"), -1.0, "'lr_sum': -1"),
    ((*ROUND, "names"), ["0.weight"], "fragments"),
    (("groups",), [["0.weight"]], "groups"),
    (REFERENCE[:2], GONE, "reference"),
    (REFERENCE, GONE, "0.bias"),
    (REFERENCE, torch.ones(7), "0.bias"),
    (REFERENCE, NAN.repeat(4), "0.bias"),
    (("slots", "outer_momentum", "tensors", "0.bias"), [0.0] * 4, "0.bias"),
    (("slots", "error", "tensors", "0.bias"), NAN.repeat(4), "0.bias"),
]


def changed(state, path, value):
    """A copy of the state with another value at `path`, or without that entry."""
    state = copy.deepcopy(state)
    *parents, last = path
    inner = state
    for key in parents:
        inner = inner[key]
    if value is GONE:
        del inner[last]
    else:
        inner[last] = value
    return state


@pytest.mark.parametrize("damage", some(DAMAGES, of=3))
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
    for word in words:
        assert word in str(error)
    if path[-1] == "schedule":
        # Advice for methods would not fit.
        assert not any(word in str(error) for word in ("redistribute", "swap", "register"))


# --- Other weights, other steps -------------------------------------------------------------------


def with_weights_of(chosen):
    """Resume inside a round, with the weights of rank ``chosen(rank)``."""
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


def test_weights_of_rank_0_everywhere_are_found_at_the_next_step_on_all_ranks():
    # DDP's constructor does this to weights that were loaded before it.
    body = partial(with_weights_of, lambda rank: 0)
    words = ("none on rank 0", "DistributedDataParallel", "on ranks 1, 2")
    assert_refused(3, body, torchcomp.RankMismatchError, *words)


def test_wrong_weights_on_all_ranks_are_found_at_the_next_step():
    body = partial(with_weights_of, lambda rank: (rank + 1) % 3)
    assert_refused(3, body, torchcomp.CheckpointError, "DistributedDataParallel")


@pytest.mark.parametrize("cuts", [(3, 4), (3, 7), (3, None)])
def test_checkpoints_of_different_steps_are_found_at_the_next_step(cuts):
    def body():
        """Each rank resumes from its own step, or starts a new run if that is None."""
        script, again, saved = Script(**RUN), Script(**RUN), {}
        for step in range(8):
            saved[step] = copy.deepcopy(script.save())
            script.step(step)
        cut = cuts[script.rank]
        if cut is not None:
            again.load(saved[cut])
        again.step(cut or 0)

    words = (f"{cuts[0]} on rank 0", f"{cuts[1] or 0} on rank 1")
    assert_refused(2, body, torchcomp.RankMismatchError, *words)
