"""fall_back: what is averaged uncompressed, for how long, and that nothing of it is lost."""

import copy

import pytest
import torch

from tests.engine import small
from tests.guard.runs import EVERY
from tests.support.cases import thorough
from tests.support.models import (
    CONSERVING,
    METHODS,
    Account,
    assert_conserved,
    kept,
    mlp,
    rebuilt_buckets,
    rows,
    wrap,
)
from tests.support.outcomes import messages_of, raised_by, reloaded, same
from tests.support.ranks import on_threads
from torchcomp import CheckpointError, Guard, register
from torchcomp.bucket import Bucket

TOPK = "ef(topk(0.1))"
OTHER = "bidirectional(topk(0.1), topk(0.1))"
WHOLE = 'bidirectional(topk(0.1, scope="model"), randk(0.3))'
LAYER = Guard(every=EVERY, age=EVERY, fall_back="layer", callback=lambda alarm: None)
MODEL = Guard(every=EVERY, age=EVERY, fall_back="model", callback=lambda alarm: None)


def accuse(averager, name, last=10**6):
    """Let the guard believe, until a step, that the method doubles a parameter. The run is right.

    While the parameter is averaged uncompressed, the guard sees what there is.
    """
    monitor = averager.monitor
    after = monitor.after

    def changed(bucket, method, state):
        believes = method == averager.aggregator and averager.step < last
        if believes and name in bucket.names:
            bucket = Bucket(bucket.shape, bucket.flat.clone())
            bucket.parts()[name].mul_(2).add_(1)
        after(bucket, method, state)

    monitor.after = changed


def averager(exchange, method, guard=LAYER, name="matrix", last=10**6, **options):
    made = small.averager(exchange, method, guard=guard, **options)
    accuse(made, name, last)
    return made


def is_dense(means, step, names, ranks=2):
    """Whether a step has applied the dense mean of these parameters."""
    dense = small.total([small.gradients(step, rank) for rank in range(ranks)])
    return all(torch.allclose(means[n], dense[n] / ranks, rtol=0, atol=1e-12) for n in names)


def test_a_layer_is_averaged_uncompressed_for_pauses_that_double():
    def body(exchange):
        return small.train(averager(exchange, TOPK), 0, 101)

    means, others = small.on_ranks(2, body)
    assert same(means, others)
    found = [step for step in range(101) if is_dense(means[step], step, ["matrix"])]
    # The first step of a pause also sends the residual.
    pauses = [(10, 20), (30, 50), (60, 100)]
    assert found == [step for begin, end in pauses for step in range(begin + 1, end)]
    assert not any(is_dense(means[step], step, ["conv"]) for step in range(101))


def test_a_layer_that_has_recovered_begins_with_a_short_pause_again():
    def body(exchange):
        made = averager(exchange, TOPK, last=15)
        small.train(made, 0, 75)
        accuse(made, "matrix")
        small.train(made, 75, 81)
        return made.state_dict()["guard"]["pauses"]

    assert small.on_ranks(2, body) == [{"matrix": [90, 10]}] * 2


def test_an_alarm_in_a_pause_goes_on_with_it_and_does_not_double_it():
    def body(exchange):
        made = small.averager(exchange, TOPK, guard=LAYER)
        after = made.monitor.after

        def changed(bucket, method, state):
            if made.step < 45 and "matrix" in bucket.names:
                bucket = Bucket(bucket.shape, bucket.flat.clone())
                bucket.parts()["matrix"].mul_(2).add_(1)
            after(bucket, method, state)

        made.monitor.after = changed
        small.train(made, 0, 45)
        return made.state_dict()["guard"]["pauses"]

    assert small.on_ranks(2, body) == [{"matrix": [50, 10]}] * 2


@pytest.mark.parametrize("method", [TOPK, WHOLE])
def test_the_whole_model_is_averaged_uncompressed(method):
    def body(exchange):
        made = averager(exchange, method, MODEL, last=15)
        return small.train(made, 0, 22), made.buckets

    (means, buckets), _ = small.on_ranks(2, body)
    names = ["bias", "conv", "matrix", "gain"]
    found = [step for step in range(22) if is_dense(means[step], step, names)]
    assert found == list(range(11, 20))
    assert len(buckets) == (1 if method == WHOLE else 2)


def test_a_method_without_a_residual_falls_back_to_the_mean():
    def body(exchange):
        made = small.averager(exchange, "topk(0.05)", guard=LAYER)
        return small.train(made, 0, 20)

    (means, _) = small.on_ranks(2, body)
    names = ["bias", "conv", "matrix", "gain"]
    assert [s for s in range(20) if is_dense(means[s], s, names)] == list(range(10, 20))


CASES = [TOPK, WHOLE, *thorough([m for m in CONSERVING[1:] if m != WHOLE])]


@pytest.mark.parametrize("guard", [LAYER, MODEL], ids=["layer", "model"])
@pytest.mark.parametrize("method", CASES)
def test_nothing_is_lost_from_before_the_first_pause_to_after_it(method, guard):
    def body(exchange):
        return small.book(averager(exchange, method, guard), 0, 25)

    small.assert_conserved(small.on_ranks(2, body), 1e-9)


@pytest.mark.parametrize("to", ["mean", *thorough(["powersgd(rank=1)", WHOLE])])
def test_nothing_is_lost_if_the_method_is_swapped_in_a_pause(to):
    def body(exchange):
        made = averager(exchange, OTHER)
        before, means, _ = small.book(made, 0, 15)
        assert "matrix" in made.state_dict()["guard"]["dense"]
        made.use(to)
        dense, applied, residual = small.book(made, 15, 35)
        return small.total([before, dense]), small.total([means, applied]), residual

    small.assert_conserved(small.on_ranks(2, body), 1e-9)


def test_nothing_is_lost_if_the_groups_change_in_a_pause():
    def body(exchange):
        made = averager(exchange, OTHER)
        before, means, _ = small.book(made, 0, 15)
        made.regroup([("gain", "conv"), ("bias", "matrix", "empty")])
        dense, applied, residual = small.book(made, 15, 35)
        return small.total([before, dense]), small.total([means, applied]), residual

    small.assert_conserved(small.on_ranks(2, body), 1e-9)


SOME = ["dgc(topk(0.1))", "ef21(topk(0.1))", WHOLE]
# These have no such alarm, or are averaged uncompressed anyway.
OTHERS = ("mean", "ef(identity)", 'topk(k=3, scope="tensor")')
RESUMED = [
    *SOME,
    *thorough(
        m for m in METHODS if m not in (*SOME, *OTHERS) and "warmup" not in m and "unb" not in m
    ),
]


@pytest.mark.parametrize("method", RESUMED)
def test_a_run_continues_bit_for_bit_from_a_checkpoint_in_a_pause(method):
    def body(exchange):
        made, again = averager(exchange, method), averager(exchange, method)
        small.train(made, 0, 14)
        again.load_state_dict(reloaded(made.state_dict()))
        runs = [(small.train(each, 14, 32), each.state_dict()) for each in (made, again)]
        return [(means, messages_of(state)) for means, state in runs]

    for straight, resumed in small.on_ranks(2, body):
        assert straight[1]["guard"]["pauses"]["matrix"] == [50, 20]
        assert same(straight, resumed)


def test_a_run_without_the_guard_goes_on_from_a_checkpoint_in_a_pause():
    def body(exchange):
        made, plain = averager(exchange, TOPK), small.averager(exchange, TOPK)
        before, means, _ = small.book(made, 0, 15)
        plain.load_state_dict(reloaded(made.state_dict()))
        dense, applied, residual = small.book(plain, 15, 18)
        assert plain.buckets == plain.groups
        return small.total([before, dense]), small.total([means, applied]), residual

    small.assert_conserved(small.on_ranks(2, body))


DAMAGES = [
    ("dense", 7),
    ("dense", [7]),
    ("dense", ["nobody"]),
    ("dense", ["matrix", "bias"]),
    ("pauses", []),
    ("pauses", {"matrix": 7}),
    ("pauses", {"matrix": [7]}),
    ("pauses", {"matrix": [7, 8, 9]}),
    ("pauses", {"matrix": [20, -10]}),
    ("pauses", {"matrix": [20, 1.5]}),
    ("pauses", {"nobody": [20, 10]}),
    ("buckets", [["bias", "conv", "empty"], ["matrix", "gain"]]),
]


@pytest.mark.parametrize(("field", "value"), DAMAGES)
@pytest.mark.parametrize("method", [TOPK, *thorough(["dgc(topk(0.1))"])])
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(method, field, value):
    def body(exchange):
        made = averager(exchange, method)
        small.train(made, 0, 15)
        state = made.state_dict()
        damaged = copy.deepcopy(state)
        (damaged if field == "buckets" else damaged["guard"])[field] = value
        error = raised_by(lambda: made.load_state_dict(damaged))
        return error, same(state, made.state_dict())

    (outcome,) = small.on_ranks(1, body)
    assert type(outcome[0]) is CheckpointError
    assert "guard" in str(outcome[0])
    assert outcome[1]


@pytest.mark.parametrize("spec", [TOPK, *thorough(["mean", CONSERVING[1], WHOLE])])
def test_through_ddp_a_pause_outlives_its_rebuilt_buckets(spec):
    def body():
        model = wrap(mlp())
        handle = register(model, spec, guard=Guard(every=1, fall_back="layer"))
        accuse(handle.averager, "2.weight", last=1)
        account, dense = Account(), []
        for step in range(6):
            account.step(model, (rows(step),))
            dense.append(handle.state_dict()["guard"]["dense"])
        left = handle.guard.alarms
        handle.close()
        return account.close(handle), dense, rebuilt_buckets(model), left

    found = on_threads(2, body)
    assert_conserved([account for account, *_ in found], 1e-9)
    for _, dense, buckets, alarms in found:
        assert dense == [["2.weight"], [], [], [], [], []]
        assert buckets > 1
        assert not alarms


def test_the_residual_of_a_layer_is_sent_in_the_first_step_of_its_pause():
    def body(exchange):
        made = averager(exchange, TOPK)
        small.train(made, 0, 11)
        residual = kept(made.state_dict())
        return float(residual["matrix"].abs().max()), float(residual["conv"].abs().max())

    for paused, other in small.on_ranks(2, body):
        assert paused < 1e-12 < other


def test_a_guard_that_only_reports_changes_nothing():
    def body(exchange, guard):
        made = small.averager(exchange, TOPK, guard=guard)
        if guard:
            accuse(made, "matrix")
        return small.train(made, 0, 25), messages_of(made.state_dict())

    guarded = small.on_ranks(2, lambda e: body(e, Guard(every=5, callback=lambda alarm: None)))
    assert same(guarded, small.on_ranks(2, lambda e: body(e, False)))
