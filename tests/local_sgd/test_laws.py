"""What holds with every schedule and option: equal ranks, errors on all, and runs that resume."""

from functools import partial

import pytest
from torch import nn

import torchcomp
from tests.local_sgd.script import (
    Script,
    constant,
    convnet,
    cosine,
    float32_mlp,
    mlp,
    momentum,
    spied,
    synchronised_steps,
)
from tests.support.cases import thorough
from tests.support.outcomes import messages, reloaded, same
from tests.support.ranks import on_processes, on_threads
from torchcomp.local_sgd import Nesterov, SlowMo
from torchcomp.local_sgd.outer_steps import OUTER_STEPS
from torchcomp.local_sgd.schedules import SCHEDULES
from torchcomp.specs.spec import parse_outer_step

STEPS = 11
TOPK, EXACT = "ef(topk(0.1))", 'bidirectional(topk(0.2), topk(0.2), selection="exact")'
OPTIONS = {
    "plain": {},
    "overlap": {"overlap": True},
    "slowmo": {"outer": "slowmo"},
    "topk": {"compress": TOPK, "outer": Nesterov(lr=0.8)},
    "thresholds": {"compress": EXACT, "outer": Nesterov()},
    "tensor": {"compress": 'ef(topk(k=3, scope="tensor"))'},
    "model": {"compress": 'ef(topk(0.1, values="int8", scope="model"))', "outer": SlowMo(beta=0.6)},
    "average": {"compress": TOPK, "moments": "average"},
    "reset": {"moments": "reset"},
    "random": {"compress": 'ef(quantize("int4", rounding="stochastic"))'},
    "randk": {"compress": "ef(randk(0.2))"},
    "bf16": {"compress": 'ef(cast("bf16"), exchange="gather", memory_dtype="bf16")'},
    "cast": {"compress": 'cast("bf16")'},
    "sharded": {"compress": 'ef(topk(0.1, values="int8"), exchange="sharded")'},
    "shards": {"compress": 'bidirectional(topk(0.2), quantize("int8"), selection="shard")'},
    "lossy": {"compress": 'mean(quantize("int8"))'},
}
# Of the schedules, the ends of the rounds of 11 steps at a learning rate of 0.05.
EVERY = "every(3)"
ENDS = {
    EVERY: [3, 6, 9, 11],
    "qsr(alpha=0.1, h_base=2)": [4, 8, 11],
    "power(coef=0.26, exponent=1, h_base=2)": [5, 10, 11],
    "post_local(switch=2, h=4)": [1, 2, 6, 10, 11],
    "swap(switch=3)": [1, 2, 3, 11],
}
# Every schedule with the plain average, and every option with one schedule.
OFTEN = ("plain", "overlap", "slowmo", "topk", "thresholds", "model", "shards")
CASES = [(spec, "plain") for spec in ENDS if spec != EVERY]
CASES += [
    pytest.param(EVERY, name, marks=() if name in OFTEN else pytest.mark.thorough)
    for name in OPTIONS
]


def test_every_schedule_and_every_outer_step_is_in_the_matrix():
    assert {type(torchcomp.parse(spec)) for spec in ENDS} == set(SCHEDULES)
    outer = [each["outer"] for each in OPTIONS.values() if "outer" in each]
    assert set(map(type, map(parse_outer_step, outer))) == set(OUTER_STEPS)


def ends_of(spec):
    ends = torchcomp.sync_steps(spec, lr=constant, total_steps=STEPS)
    assert ends == ENDS[spec]
    return ends


def weights_of(spec, name, build):
    script, weights = Script(spec, total_steps=STEPS, build=build, local=OPTIONS[name]), []
    for step in range(STEPS):
        script.step(step)
        script.sync.wait()
        weights.append(script.weights())
    script.sync.close()
    return weights


def of_all_options():
    return [weights_of(EVERY, name, float32_mlp) for name in OPTIONS]


def half():
    return mlp().bfloat16()


@pytest.mark.parametrize(("spec", "name"), CASES)
def test_ranks_are_equal_after_a_synchronisation_and_differ_within_a_round(spec, name):
    runs, ends = on_threads(3, weights_of, spec, name, half), ends_of(spec)
    assert synchronised_steps(runs) == ends
    for step in {*range(1, STEPS + 1)} - {*ENDS[spec]}:
        assert len({tuple(run[step - 1].tolist()) for run in runs}) == 3


def test_the_same_over_gloo():
    for runs in zip(*on_processes(2, of_all_options), strict=True):
        assert synchronised_steps(list(runs)) == ends_of(EVERY)


# --- Errors ---------------------------------------------------------------------------------------


def poisoned(spec, name, bad):
    """Damage rank 1's parameters after its local step, before the second average."""
    local, end = [], ENDS[spec][1]

    def look():
        if script.rank == 1 and len(local) == end - 1:
            nn.init.constant_(script.model.module[2].bias.detach(), bad)
        local.append(script.weights())

    options = {"optimizer": spied(momentum, look), "bucket_cap_mb": 0.0002}
    script = Script(spec, total_steps=STEPS, local=OPTIONS[name], **options)
    script.train(0, end - 1)
    before = reloaded(script.sync.state_dict()["slots"])
    traffic = script.sync.stats
    with pytest.raises(torchcomp.NonFiniteError) as raised:
        script.step(end - 1)
    script.sync.wait()
    unchanged = same(local[-1].nan_to_num(), script.weights().nan_to_num())
    unchanged &= same(before, reloaded(script.sync.state_dict()["slots"]))
    after = script.sync.stats
    return str(raised.value), unchanged, after.syncs - traffic.syncs, script.sync.next_sync


@pytest.mark.parametrize(("spec", "name"), CASES)
@pytest.mark.parametrize("bad", [float("nan"), *thorough([float("-inf")])])
def test_parameters_that_are_not_finite_on_one_rank(spec, name, bad):
    end = ENDS[spec][1]
    for message, unchanged, syncs, next_sync in on_threads(3, poisoned, spec, name, bad):
        assert "'2.bias' on rank 1" in message
        assert f"step {end}" in message
        assert (unchanged, syncs, next_sync) == (True, 0, end)


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


def resumed(name, cut, first="model", **changes):
    """Whether a run that is saved at `cut` and loaded into new objects equals a whole run."""
    options = {**RUN, "local": OPTIONS[name], **changes}
    whole, interrupted, again = (Script(**options) for _ in range(3))
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


@pytest.mark.parametrize(("spec", "name"), CASES)
def test_a_resumed_run_with_options_is_bit_identical(spec, name):
    changes = {} if spec == EVERY else {"spec": spec}
    assert on_threads(3, partial(resumed, name, 4, **changes)) == [True] * 3
