"""What holds with every option: equal ranks, errors on all of them, and runs that resume."""

from functools import partial

import numpy as np
import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import torchcomp
from tests.local_sgd.script import (
    Script,
    adamw,
    convnet,
    cosine,
    float32_mlp,
    mlp,
    momentum,
    spied,
    synchronised_steps,
)
from tests.support.cases import some, thorough
from tests.support.outcomes import equal_on_all, messages, reloaded, same
from tests.support.ranks import on_processes, on_threads
from torchcomp.local_sgd import Nesterov, SlowMo
from torchcomp.local_sgd.schedules import Every

STEPS, ENDS = 11, [3, 6, 9, 11]
TOPK = "ef(topk(0.1))"
OPTIONS = {
    "plain": {},
    "overlap": {"overlap": True},
    "reset": {"moments": "reset"},
    "slowmo": {"outer": "slowmo"},
    "topk": {"compress": TOPK, "outer": Nesterov(lr=0.8)},
    "fragments": {"compress": TOPK, "outer": SlowMo(), "fragments": 3},
    "thresholds": {
        "compress": 'bidirectional(topk(0.2), topk(0.2), selection="exact")',
        "outer": Nesterov(),
    },
    "tensor": {"compress": 'ef(topk(k=3, scope="tensor"))'},
    "model": {"compress": 'ef(topk(0.1, values="int8", scope="model"))', "outer": SlowMo(beta=0.6)},
    "average": {"compress": TOPK, "moments": "average"},
    "random": {"compress": 'ef(quantize("int4", rounding="stochastic"))'},
    "randk": {"compress": "ef(randk(0.2))"},
    "bf16": {"compress": 'ef(cast("bf16"), exchange="gather", memory_dtype="bf16")'},
    "cast": {"compress": 'cast("bf16")'},
    "sharded": {"compress": 'ef(topk(0.1, values="int8"), exchange="sharded")'},
    "shards": {"compress": 'bidirectional(topk(0.2), quantize("int8"), selection="shard")'},
    "lossy": {"compress": 'mean(quantize("int8"))'},
}


def weights_of(name, build):
    script, weights = Script(total_steps=STEPS, build=build, local=OPTIONS[name]), []
    for step in range(STEPS):
        script.step(step)
        script.sync.wait()
        weights.append(script.weights())
    script.sync.close()
    return weights


def of_all_options():
    return [weights_of(name, float32_mlp) for name in OPTIONS]


def assert_equal_at_the_ends(runs, name):
    # Three fragments, one of which synchronises after each step, are equal only at the end.
    assert synchronised_steps(runs) == (ENDS[-1:] if name == "fragments" else ENDS)


def half():
    return mlp().bfloat16()


@pytest.mark.parametrize("name", some(OPTIONS, of=3))
@pytest.mark.parametrize("build", [half, *thorough([float32_mlp])])
def test_ranks_are_equal_after_a_synchronisation_and_differ_within_a_round(name, build):
    runs = on_threads(3, weights_of, name, build)
    assert_equal_at_the_ends(runs, name)
    for step in (0, 1, 3, 4, 6, 7, 9):
        assert len({tuple(run[step].tolist()) for run in runs}) == 3


def test_the_same_over_gloo():
    for name, runs in zip(OPTIONS, zip(*on_processes(2, of_all_options), strict=True), strict=True):
        assert_equal_at_the_ends(list(runs), name)


# --- Errors ---------------------------------------------------------------------------------------


def poisoned(name, bad):
    """Damage rank 1's parameters after its sixth local step, before the average."""
    local = []

    def look():
        if script.rank == 1 and len(local) == 5:
            nn.init.constant_(script.model.module[2].bias.detach(), bad)
        local.append(script.weights())

    options = {"optimizer": spied(momentum, look), "bucket_cap_mb": 0.0002}
    script = Script(total_steps=STEPS, local=OPTIONS[name], **options)
    script.train(0, 5)
    before = reloaded(script.sync.state_dict()["slots"])
    traffic = script.sync.stats
    with pytest.raises(torchcomp.NonFiniteError) as raised:
        script.step(5)
    script.sync.wait()
    unchanged = same(local[-1].nan_to_num(), script.weights().nan_to_num())
    unchanged &= same(before, reloaded(script.sync.state_dict()["slots"]))
    after = script.sync.stats
    return str(raised.value), unchanged, after.syncs - traffic.syncs, script.sync.next_sync


@pytest.mark.parametrize("name", some(OPTIONS, of=3))
@pytest.mark.parametrize("bad", [float("nan"), *thorough([float("-inf")])])
def test_parameters_that_are_not_finite_on_one_rank(name, bad):
    for message, unchanged, syncs, next_sync in on_threads(3, poisoned, name, bad):
        for word in ("'2.bias' on rank 1", "step 6"):
            assert word in message
        assert (unchanged, syncs, next_sync) == (True, 0, 6)


# --- Checkpoints ----------------------------------------------------------------------------------

TOTAL = 12
RUN = {
    # Rounds end at 2, 6, 11 and 12. The learning rate falls inside each round, so its end cannot be
    # computed from the learning rate at which the run resumes.
    "spec": "qsr(alpha=0.2, h_base=2)",
    "total_steps": TOTAL,
    "warmup_steps": 1,
    "lr": partial(cosine, peak=0.1, warmup=1, total=24),
    "build": convnet,
    "shape": (3, 4, 4),
}


def everything(script):
    return [script.weights(), script.buffers(), reloaded(script.optimizer.state_dict())]


def resumed(name, cut, first="model"):
    """Whether a run that is saved at `cut` and loaded into new objects equals a whole run."""
    whole, interrupted, again = (Script(**RUN, local=OPTIONS[name]) for _ in range(3))
    expected, before = whole.train(0, TOTAL), interrupted.train(0, cut)
    saved = reloaded(interrupted.save())
    if first == "sync":
        again.sync.load_state_dict(saved["sync"])
    again.load(reloaded(saved))  # the optimizer would change the tensors in place
    # A loaded state can be saved again before the next step.
    assert same(again.sync.state_dict(), saved["sync"])
    assert again.sync.next_sync == interrupted.sync.next_sync
    actual = [*before, *again.train(cut, TOTAL), *everything(again)]
    assert messages(again.sync.stats) == messages(whole.sync.stats)
    # A run in progress can go back to a checkpoint.
    again.load(saved)
    actual += again.train(cut, TOTAL)
    return same(actual, [*expected, *everything(whole), *expected[cut:]])


@pytest.mark.parametrize("first", ["model", "sync"])
@pytest.mark.parametrize("cut", [4, *thorough([6, 0, 1, 2, 11])])
def test_a_resumed_run_is_bit_identical(cut, first):
    ends = torchcomp.sync_steps(RUN["spec"], lr=RUN["lr"], total_steps=TOTAL, warmup_steps=1)
    assert ends == [2, 6, 11, 12]
    assert on_threads(3, resumed, "plain", cut, first) == [True] * 3


@pytest.mark.parametrize("name", some(OPTIONS, of=4))
def test_a_resumed_run_with_options_is_bit_identical(name):
    assert on_threads(3, resumed, name, 4) == [True] * 3


def through_dcp(name, folder):
    """The same as `resumed`, in the way of users of torch.distributed.checkpoint."""
    options = RUN | {"optimizer": adamw, "local": OPTIONS[name]}
    whole, interrupted, again = (Script(**options) for _ in range(3))
    expected = whole.train(0, TOTAL)
    interrupted.train(0, 4)
    # get_state_dict steps the new optimizer at learning rate 0; this must not count.
    both = [get_state_dict(script.model, script.optimizer) for script in (interrupted, again)]
    saved, state = (
        {f"rank{dist.get_rank()}": {"model": model, "optimizer": held, "sync": sync.state_dict()}}
        for (model, held), sync in zip(both, (interrupted.sync, again.sync), strict=True)
    )
    dcp.save(saved, checkpoint_id=folder)
    dcp.load(state, checkpoint_id=folder)
    (own,) = state.values()
    model, held = own["model"], own["optimizer"]
    set_state_dict(again.model, again.optimizer, model_state_dict=model, optim_state_dict=held)
    again.sync.load_state_dict(own["sync"])
    again.scheduler.load_state_dict(interrupted.scheduler.state_dict())
    actual = [*again.train(4, TOTAL), *everything(again)]
    assert messages(again.sync.stats) == messages(whole.sync.stats)
    return same(actual, [*expected[4:], *everything(whole)])


def all_through_dcp(folder):
    names = ("plain", "thresholds", "fragments")
    return [through_dcp(name, f"{folder}/{name}") for name in names] + [resumed("plain", 4)]


def test_a_run_of_processes_resumes_from_a_distributed_checkpoint(tmp_path):
    assert on_processes(2, all_through_dcp, str(tmp_path)) == [[True] * 4] * 2


def test_the_groups_come_from_the_checkpoint():
    def body():
        options = RUN | {"build": partial(convnet, 16), "local": {"compress": "ef(topk(0.02))"}}
        whole, interrupted = (Script(**options, bucket_cap_mb=0.001) for _ in range(2))
        expected = whole.train(0, TOTAL)
        interrupted.train(0, 4)
        again = Script(**options)
        again.load(reloaded(interrupted.save()))
        return same(again.train(4, TOTAL), expected[4:])

    assert on_threads(2, body) == [True, True]


def test_a_run_with_options_of_numpy_numbers_can_be_loaded():
    def body():
        numbers = {"total_steps": np.int64(6), "warmup_steps": np.float64(2)}
        local = {"fragments": np.int64(2), "compress": TOPK}
        script = Script(Every(np.int64(4)), **numbers, local=local)
        script.train(0, 3)
        script.load(reloaded(script.save()))
        return script.train(3, 6)[-1]

    assert equal_on_all(on_threads(2, body))
