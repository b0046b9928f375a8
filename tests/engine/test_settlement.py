"""Settlement: whether the last step counts, at once or late, and what is rolled back if not."""

import threading

import pytest

from tests.engine import small
from tests.engine.test_damage import ANOTHER_LAYOUT, damage
from tests.support.outcomes import caught, same
from torchcomp import NonFiniteError, WireError
from torchcomp.engine.settlement import Steps

# --- Reasons --------------------------------------------------------------------------------------


@pytest.mark.parametrize("answers", [(True, False), (False, True), (True, True)])
def test_it_counts_if_all_reasons_agree(answers):
    steps, asked = Steps(), []
    steps._end(True, tuple(lambda each=each: asked.append(each) or each for each in answers))
    assert steps.undecided
    assert asked == []
    for _ in range(2):  # decided once
        steps.decide()
        assert steps.step == all(answers)


def test_a_step_that_was_discarded_while_a_reason_was_asked_is_left_alone():
    steps = Steps()

    def reason():
        steps._discard()  # such as a checkpoint that another thread loads
        return False

    steps._end(True, (reason,))
    steps.decide()
    assert steps.step == 1


def test_two_threads_decide_once():
    steps, asking, go = Steps(), threading.Event(), threading.Event()

    def reason():
        asking.set()
        assert go.wait(60)
        return False

    steps._end(True, (reason,))
    threads = [threading.Thread(target=steps.decide) for _ in range(2)]
    threads[0].start()
    assert asking.wait(60)
    threads[1].start()
    go.set()
    for thread in threads:
        thread.join()
    assert steps.step == 0


# --- Checks that come one step late ---------------------------------------------------------------

TOPK = "ef(topk(0.3))"
METHODS = [
    TOPK,
    'ef(cast("fp16"))',
    "topk(0.3)",
    "bidirectional(topk(0.3), topk(0.3))",
    "powersgd(rank=1)",
]


@pytest.mark.parametrize("method", [*METHODS, "mean"])
def test_without_errors_a_run_is_the_same_bit_for_bit(method):
    def body(exchange, late):
        averager = small.averager(exchange, method, late=late)
        return small.train(averager, 0, 4), averager.state_dict(), averager.stats

    assert same(*(small.on_ranks(2, lambda e, late=late: body(e, late)) for late in (False, True)))


NEXT = {
    "begin": lambda averager: averager.begin(),
    "state_dict": lambda averager: averager.state_dict(),
    "use": lambda averager: averager.use("mean"),
    "regroup": lambda averager: averager.regroup(averager.groups),
}


@pytest.mark.parametrize("call", NEXT)
@pytest.mark.parametrize("method", METHODS)
def test_a_nan_is_raised_by_the_next_call_and_the_run_continues_as_without_the_step(method, call):
    def body(exchange, fails):
        averager = small.averager(exchange, method, late=True)
        small.train(averager, 0, 2)
        before, error = averager.state_dict(), None
        if fails:
            assert small.step(averager, small.poisoned(2, exchange.rank))[0] is True
            error = caught(lambda: NEXT[call](averager))
            after = averager.state_dict()
            # The step goes back, and its bytes were sent. `use` and `regroup` raise before they
            # change anything.
            assert {key for key in before if not same(before[key], after[key])} == {"traffic"}
        return error, small.train(averager, 3, 5), averager.state_dict()["slots"]

    failed, plain = (small.on_ranks(2, lambda e, fails=f: body(e, fails)) for f in (True, False))
    for (error, *found), (_, *wanted) in zip(failed, plain, strict=True):
        assert type(error) is NonFiniteError
        assert "'bias' on rank 1" in str(error)
        assert "rank 0" not in str(error)
        assert "step 3" in str(error)
        assert same(found, wanted)


@pytest.mark.parametrize("abandoned", [False, True])
def test_a_step_that_a_scaler_skips_keeps_its_number(abandoned):
    def body(exchange):
        averager = small.averager(exchange, TOPK, late=True)
        small.train(averager, 0, 2)
        before = averager.state_dict()["slots"]
        small.step(averager, small.poisoned(2, exchange.rank), may_skip=True)
        if abandoned and exchange.rank == 0:  # its next pass raised before this step was settled
            averager.abandon(averager.step)
            averager.abandoned = False
        return averager.state_dict()["step"], same(averager.state_dict()["slots"], before)

    assert small.on_ranks(2, body) == [(3, True)] * 2


def test_a_damaged_frame_is_raised_late():
    def body(exchange):
        averager = small.averager(exchange, TOPK, late=True)
        damage(exchange, 0, 1, ANOTHER_LAYOUT)
        small.step(averager, small.gradients(0, exchange.rank))
        error = caught(averager.begin)
        return type(error), "rank 1's" in str(error), averager.step, averager.residual_norms()

    zeros = dict.fromkeys(small.parameters(), 0.0)
    assert small.on_ranks(2, body) == [(WireError, True, 0, zeros)] * 2


OTHER_GROUPS = (("gain", "conv"), ("bias", "empty", "matrix"))


def rebuilt(averager):
    """Buckets that come in another form, as when DDP rebuilds its own."""
    averager.buckets = OTHER_GROUPS


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("method", "change"),
    [
        ('ef(cast("fp16"))', rebuilt),
        (TOPK, lambda averager: averager.regroup(OTHER_GROUPS)),
        (TOPK, lambda averager: averager.use("mean")),
        # Here, the server residual of the old buckets is added to the residual.
        ("bidirectional(topk(0.3), topk(0.3))", lambda averager: averager.regroup(OTHER_GROUPS)),
    ],
)
def test_several_steps_are_taken_back_although_their_buckets_differ(method, change, late):
    def body(exchange, takes_steps):
        averager = small.averager(exchange, method, late=late, takes_back=True)
        small.train(averager, 0, 2)
        if takes_steps:
            small.train(averager, 2, 3)
            averager.keep_before()
        change(averager)
        if takes_steps:
            small.train(averager, 3, 4)
            averager.keep_before()
            small.train(averager, 4, 5)
            averager.take_back()
        return averager.step, small.residual(averager)

    assert same(*(small.on_ranks(2, lambda e, t=t: body(e, t)) for t in (True, False)))


def test_a_loaded_checkpoint_ends_what_is_undecided():
    def body(exchange):
        averager = small.averager(exchange, TOPK, late=True)
        small.train(averager, 0, 2)
        state = averager.state_dict()
        small.step(averager, small.poisoned(2, exchange.rank))
        averager.load_state_dict(state)
        return small.train(averager, 2, 4)

    undisturbed = small.on_ranks(2, lambda e: small.train(small.averager(e, TOPK), 0, 4)[2:])
    assert same(small.on_ranks(2, body), undisturbed)


def test_a_step_whose_result_is_needed_is_not_late():
    def body(exchange):
        averager = small.averager(exchange, TOPK, late=True)
        tensors = small.poisoned(0, exchange.rank)
        return type(caught(lambda: small.step(averager, tensors, used=["bias"])))

    assert small.on_ranks(2, body) == [NonFiniteError] * 2
