"""A checkpoint of any step resumes bit for bit, and is refused by any other run."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import torchcomp
from tests.local_sgd.script import Script, adamw, convnet, cosine
from tests.support.cases import some, thorough
from tests.support.outcomes import assert_refused, messages, reloaded
from tests.support.ranks import on_processes, on_threads
from torchcomp.checkpoint import VERSION
from torchcomp.local_sgd import Nesterov, SlowMo
from torchcomp.schedules import Every

TOTAL = 12
OPTIONS = {
    # Rounds end at 2, 6, 11 and 12. The learning rate falls inside each round, so its end cannot be
    # computed from the learning rate at which the run resumes.
    "spec": "qsr(alpha=0.2, h_base=2)",
    "total_steps": TOTAL,
    "warmup_steps": 1,
    "lr": partial(cosine, peak=0.1, warmup=1, total=24),
    "build": convnet,
    "shape": (3, 4, 4),
}
LOADED_FIRST = ("model", "sync")


def everything(script):
    parts = [script.weights(), script.buffers(), script.moments()]
    return [*parts, torch.tensor(script.optimizer.param_groups[0]["lr"], dtype=torch.float64)]


def resumed(cut, first="model", **changes):
    """Whether a run that is saved at `cut` and loaded into new objects equals a whole run."""
    options = OPTIONS | changes
    whole = Script(**options)
    expected = whole.train(0, TOTAL)

    interrupted = Script(**options)
    before = interrupted.train(0, cut)
    saved = reloaded(interrupted.save())
    again = Script(**options)
    if first == "sync":
        again.sync.load_state_dict(saved["sync"])
    again.load(saved)
    after = again.train(cut, TOTAL)

    actual = [*before, *after, *everything(again)]
    assert messages(again.sync.stats) == messages(whole.sync.stats)
    return all(map(torch.equal, actual, [*expected, *everything(whole)]))


def test_the_setting_has_rounds_of_several_lengths():
    ends = torchcomp.sync_steps(
        OPTIONS["spec"], lr=OPTIONS["lr"], total_steps=TOTAL, warmup_steps=1
    )
    assert ends == [2, 6, 11, 12]


@pytest.mark.parametrize("first", LOADED_FIRST)
@pytest.mark.parametrize(
    "cut",
    [4, *thorough([6, 0, 1, 2, 11])],
    ids=["middle", "end2", "start", "warm-up", "end", "last-round"],
)
def test_a_resumed_run_is_bit_identical(cut, first):
    assert on_threads(3, resumed, cut, first) == [True] * 3


METHODS = {
    "plain": {},
    "sparse": {"compress": "ef(topk(0.1))", "outer": Nesterov(lr=0.8)},
    "model": {"compress": 'ef(topk(0.1, values="int8", scope="model"))', "outer": SlowMo(beta=0.6)},
    "random": {"compress": 'ef(quantize("int4", rounding="stochastic"))'},
    "bf16": {"compress": 'ef(cast("bf16"), exchange="gather", memory_dtype="bf16")'},
    "shards": {"compress": 'bidirectional(topk(0.2), quantize("int8"), selection="shard")'},
    "thresholds": {
        "compress": 'bidirectional(topk(0.2), topk(0.2), selection="exact")',
        "outer": Nesterov(),
    },
    "moments": {"compress": "ef(topk(0.1))", "moments": "average"},
    "fragments": {"compress": "ef(topk(0.1))", "outer": SlowMo(), "fragments": 3},
}


@pytest.mark.parametrize("method", some(METHODS, of=3))
def test_a_run_with_residual_and_momentum_resumes_bit_identical(method):
    body = partial(resumed, local=METHODS[method])
    assert on_threads(3, body, 4) == [True] * 3


def through_dcp(saved, fresh, folder):
    """Save `saved` of all ranks in one distributed checkpoint, and load it into `fresh`."""
    name = f"rank{dist.get_rank()}"
    dcp.save({name: saved}, checkpoint_id=folder)
    state = {name: fresh}
    dcp.load(state, checkpoint_id=folder)
    return state[name]


def parts_of(script):
    """Model, optimizer and local steps, as users of torch.distributed.checkpoint save them."""
    model, optimizer = get_state_dict(script.model, script.optimizer)
    return {"model": model, "optimizer": optimizer, "sync": script.sync.state_dict()}


def resumed_through_dcp(method, cut, folder):
    options = OPTIONS | {"optimizer": adamw, "local": METHODS[method]}
    whole, interrupted, again = (Script(**options) for _ in range(3))
    expected = whole.train(0, TOTAL)
    interrupted.train(0, cut)
    # get_state_dict steps the new optimizer at learning rate 0; this must not count.
    state = through_dcp(parts_of(interrupted), parts_of(again), f"{folder}/{method}")
    set_state_dict(
        again.model,
        again.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    again.sync.load_state_dict(state["sync"])
    again.scheduler.load_state_dict(interrupted.scheduler.state_dict())
    actual = again.train(cut, TOTAL)
    assert messages(again.sync.stats) == messages(whole.sync.stats)
    return all(
        map(torch.equal, [*actual, *everything(again)], [*expected[cut:], *everything(whole)])
    )


def all_resumed_through_dcp(folder):
    methods = ("plain", "thresholds", "fragments")
    return [resumed_through_dcp(method, 4, folder) for method in methods]


def test_a_run_resumes_inside_a_round_from_a_distributed_checkpoint(tmp_path):
    assert on_processes(2, all_resumed_through_dcp, str(tmp_path)) == [[True] * 3] * 2


def test_the_groups_come_from_the_checkpoint(tmp_path):
    def body():
        options = OPTIONS | {"build": wide, "local": {"compress": "ef(topk(0.02))"}}
        whole = Script(**options, bucket_cap_mb=0.001)
        expected = whole.train(0, TOTAL)
        interrupted = Script(**options, bucket_cap_mb=0.001)
        interrupted.train(0, 4)
        again = Script(**options)
        again.load(copy.deepcopy(interrupted.save()))
        return torch.equal(torch.stack(again.train(4, TOTAL)), torch.stack(expected[4:]))

    assert on_threads(2, body) == [True, True]


def wide():
    return convnet(16)


def test_a_run_resumed_by_processes_is_bit_identical():
    assert on_processes(2, resumed, 4) == [True] * 2


def test_a_run_in_progress_can_go_back_to_a_checkpoint():
    def body():
        script = Script(**OPTIONS)
        script.train(0, 4)
        # Reloaded, because later steps change the live state in place.
        saved = reloaded(script.save())
        expected = script.train(4, TOTAL)
        script.load(saved)
        return torch.equal(torch.stack(script.train(4, TOTAL)), torch.stack(expected))

    assert on_threads(2, body) == [True, True]


def test_a_loaded_state_can_be_saved_again_before_the_next_step():
    def body():
        script, again = Script(**OPTIONS), Script(**OPTIONS)
        script.train(0, 4)
        again.load(script.save())
        return script.sync.state_dict() == again.sync.state_dict()

    assert on_threads(2, body) == [True, True]


def test_a_run_with_options_of_numpy_numbers_can_be_loaded():
    def body():
        numbers = {"total_steps": np.int64(6), "warmup_steps": np.int64(2)}
        local = {"fragments": np.int64(2), "compress": "ef(topk(0.1))"}
        script = Script(Every(np.int64(4)), **numbers, local=local)
        script.train(0, 3)
        script.load(reloaded(script.save()))
        script.train(3, 6)

    on_threads(2, body)


def test_next_sync_survives():
    def body():
        script, again = Script(**OPTIONS), Script(**OPTIONS)
        script.train(0, 4)
        again.load(script.save())
        return again.sync.next_sync

    assert on_threads(2, body) == [6, 6]


def with_weights_of(chosen):
    """Resume inside a round, with the weights of rank ``chosen(rank)``."""
    script, again = Script(**OPTIONS), Script(**OPTIONS)
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


OTHERS = {
    "schedule": ({"spec": "every(4)"}, "every(4)", "qsr(alpha=0.2, h_base=2)"),
    "total_steps": ({"total_steps": 20}, "20", "12"),
    "warmup_steps": ({"warmup_steps": 3}, "3", "1"),
    "compress": ({"local": {"compress": "ef(topk(0.1))"}}, "ef(topk(0.1))", "compress=mean"),
    "outer": ({"local": {"outer": Nesterov(lr=0.5)}}, "nesterov(lr=0.5)", "outer=None"),
    "moments": ({"local": {"moments": "reset"}}, "moments=reset", "moments=local"),
    "fragments": ({"local": {"fragments": 2}}, "fragments=2", "fragments=1"),
    "shape": ({"build": partial(convnet, 5)}, "0.weight", "[5, 3, 3, 3]", "[4, 3, 3, 3]"),
}


@pytest.mark.parametrize("which", some(OTHERS, of=2))
def test_a_state_of_another_run_is_refused_and_changes_nothing(which):
    options, *words = OTHERS[which]

    def body():
        other, script = Script(**OPTIONS | options), Script(**OPTIONS)
        other.train(0, 3)
        script.train(0, 1)
        before = script.sync.state_dict()
        with pytest.raises(torchcomp.CheckpointError) as raised:
            script.sync.load_state_dict(other.sync.state_dict())
        assert script.sync.state_dict() == before
        script.train(1, 3)
        return str(raised.value)

    for message in on_threads(2, body):
        for word in words:
            assert word in message


EDITS = {
    "rank": ({"rank": 7}, "7", "0"),
    "world_size": ({"world_size": 64}, "64", "1"),
    "version": ({"version": 99}, "99", str(VERSION)),
    "names": ({"parameters": {}}, "0.weight"),
    "schedule": ({"local_sgd": {"schedule": "every(7)"}}, "every(7)", "qsr("),
}


def edited(state, changes):
    """The state with some values replaced, also in nested dicts."""
    inner = {k: edited(state[k], v) if v and isinstance(v, dict) else v for k, v in changes.items()}
    return state | inner


def refusal(edit):
    """The message of the error that loading the edited state raises, on one rank."""

    def body():
        script = Script(**OPTIONS)
        state = script.sync.state_dict()
        with pytest.raises(torchcomp.CheckpointError) as raised:
            script.sync.load_state_dict(edit(state))
        assert script.sync.state_dict() == state
        return str(raised.value)

    (message,) = on_threads(1, body)
    return message


@pytest.mark.parametrize("which", EDITS)
def test_the_error_names_what_differs_and_both_values(which):
    changes, *words = EDITS[which]
    message = refusal(lambda state: edited(state, changes))
    for word in words:
        assert word in message


def test_the_error_about_the_schedule_names_only_what_local_steps_have():
    message = refusal(lambda state: edited(state, EDITS["schedule"][0]))
    for word in ("redistribute", "swap", "register"):
        assert word not in message


def changed(state, path, value=None):
    """A copy of the state with another value at `path`, or without that entry if it is None."""
    state = copy.deepcopy(state)
    *parents, last = path
    inner = state
    for key in parents:
        inner = inner[key]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return state


# Checkpoints of earlier versions lack "local_sgd".
MISSING = ["rank", "local_sgd", "local_sgd.weights", "local_sgd.saved_by", "local_sgd.fragments"]


@pytest.mark.parametrize("missing", MISSING)
def test_an_incomplete_state_is_refused(missing):
    path = missing.split(".")
    assert path[-1] in refusal(lambda state: changed(state, path))


SECTION, ROUND = ("local_sgd",), ("local_sgd", "fragments", 0)
NAN = torch.tensor(float("nan"), dtype=torch.float64)
DAMAGES = {
    "not a mapping": ((*SECTION,), [1]),
    "a string for a number": ((*SECTION, "step"), "4"),
    "a step below 0": ((*SECTION, "step"), -1),
    "half a step": ((*SECTION, "step"), 4.5),
    "a step beyond the round": ((*SECTION, "step"), 10),
    "more synchronisations than steps": ((*SECTION, "syncs"), 5),
    "an invalid saver": ((*SECTION, "saved_by"), [0]),
    "no fragments": ((*SECTION, "fragments"), []),
    "an invalid round": (ROUND, 3),
    "a round without an end": ((*ROUND, "end"), None),
    "a round that ends before it begins": ((*ROUND, "end"), 1),
    "a round that synchronised in the future": ((*ROUND, "synced"), 5),
    "learning rates that are not finite": ((*ROUND, "lrs"), [float("nan")]),
    "a sum below 0": ((*ROUND, "lr_sum"), -1.0),
    "a missing parameter": ((*ROUND, "names"), ["0.weight"]),
    "a parameter in no group": (("groups",), [["0.weight"]]),
    "no reference": (("slots", "reference"), None),
    "a reference without one parameter": (("slots", "reference", "tensors", "0.bias"), None),
    "a reference of another shape": (("slots", "reference", "tensors", "0.bias"), torch.ones(7)),
    "a reference with NaN": (("slots", "reference", "tensors", "0.bias"), NAN.repeat(4)),
    "momentum that is a list": (("slots", "outer_momentum", "tensors", "0.bias"), [0.0] * 4),
    "a residual with NaN": (("slots", "error", "tensors", "0.bias"), NAN.repeat(4)),
}


@pytest.mark.parametrize("which", some(DAMAGES, of=4))
def test_a_damaged_state_is_refused_and_the_run_continues(which):
    def body():
        options = OPTIONS | {"local": METHODS["sparse"]}
        script, whole = Script(**options), Script(**options)
        expected = whole.train(0, TOTAL)
        before = script.train(0, 4)
        state = changed(script.sync.state_dict(), *DAMAGES[which])
        with pytest.raises(torchcomp.CheckpointError):
            script.sync.load_state_dict(state)
        return torch.equal(torch.stack([*before, *script.train(4, TOTAL)]), torch.stack(expected))

    assert on_threads(1, body) == [True]


def test_a_state_of_a_registered_model_is_refused():
    def body():
        script = Script(spec=None)
        state = torchcomp.register(script.model, "mean").state_dict()
        with pytest.raises(torchcomp.CheckpointError, match="local_sgd"):
            Script(**OPTIONS).sync.load_state_dict(state)

    on_threads(1, body)


def from_steps(cuts):
    """Each rank resumes from its own step in `cuts`, or starts a new run if that is None."""
    script, again = Script(**OPTIONS), Script(**OPTIONS)
    saved = {None: None}
    for step in range(8):
        saved[step] = copy.deepcopy(script.save())
        script.step(step)
    cut = cuts[script.rank]
    if cut is not None:
        again.load(saved[cut])
    again.step(cut or 0)


@pytest.mark.parametrize(
    "cuts", [(3, 4), (3, 7), (3, None)], ids=["one-round", "two-rounds", "one-rank-only"]
)
def test_checkpoints_of_different_steps_are_found_at_the_next_step(cuts):
    words = (f"{cuts[0]} on rank 0", f"{cuts[1] or 0} on rank 1")
    assert_refused(2, partial(from_steps, cuts), torchcomp.RankMismatchError, *words)
