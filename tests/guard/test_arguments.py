"""The argument of register, its errors, and what the callback is told."""

import logging
import math

import pytest
import torch
import torch.distributed as dist

from tests.engine import small
from tests.guard.runs import accuse
from tests.support.models import loss_of, mlp, rows, wrap
from tests.support.outcomes import assert_refused
from tests.support.ranks import on_threads
from torchcomp import Guard, Handle, RankMismatchError, SpecError, register, watch

TOPK = "ef(topk(0.1))"


@pytest.mark.parametrize("value", ["yes", 1, 0, 50, {"every": 50}, Guard])
def test_what_is_no_guard_is_refused_on_all_ranks(value):
    def body():
        register(wrap(mlp()), TOPK, guard=value)

    assert_refused(2, body, SpecError, "guard", repr(value), field="guard")


BAD = [
    ({"every": 0}, "every"),
    ({"every": -1}, "every"),
    ({"every": 2.5}, "every"),
    ({"every": True}, "every"),
    ({"every": "50"}, "every"),
    ({"age": 0}, "age"),
    ({"callback": "print"}, "callback"),
]


@pytest.mark.parametrize(("options", "field"), BAD)
def test_bad_options_are_refused(options, field):
    with pytest.raises(SpecError, match=field) as caught:
        Guard(**options)
    assert caught.value.field == field


@pytest.mark.parametrize("value", [None, False])
def test_without_a_guard_nothing_is_compared(value):
    def body():
        model = wrap(mlp())
        handle = register(model, TOPK, guard=value)
        for step in range(3):
            loss_of(model(rows(step))).backward()
        handle.close()
        return handle.guard.report, handle.guard.alarms

    assert on_threads(2, body) == [(None, ())] * 2


@pytest.mark.parametrize("judge", [Handle.state_dict, Handle.close])
def test_a_state_or_the_end_judges_the_last_comparison_and_a_mean_has_no_age(judge):
    def body():
        model = wrap(mlp())
        handle = register(model, "mean", guard=Guard(every=2))
        for step in range(2):
            loss_of(model(rows(step))).backward()
        before = handle.guard.report
        judge(handle)
        report = handle.guard.report
        handle.close()
        return before, report.step, report.model.cosine, report.model.old

    for before, step, cosine, old in on_threads(2, body):
        assert before is None
        assert step == 2
        assert cosine == pytest.approx(1.0)
        assert math.isnan(old)


@pytest.mark.parametrize("value", [False, Guard(every=7), "yes"])
def test_ranks_with_other_guards_are_refused(value):
    def body():
        register(wrap(mlp()), TOPK, guard=value if dist.get_rank() == 1 else True)

    assert_refused(3, body, RankMismatchError, "guard", "rank 1")


def test_a_callback_that_raises_at_the_end_leaves_nothing_open():
    def callback(alarm):
        raise ValueError(alarm.kind)

    def body():
        model = wrap(mlp())
        handle = register(model, "mean", guard=Guard(every=1, callback=callback))
        after = handle.guard.after

        def change(bucket, method):
            bucket.flat.mul_(2)
            after(bucket, method)

        handle.guard.after = change
        loss_of(model(rows(0))).backward()
        with pytest.raises(ValueError, match="imbalance"):
            handle.close()
        handle.close()
        return handle.closed

    assert on_threads(2, body) == [True] * 2


def test_each_rank_has_a_callback_of_its_own():
    def body():
        callback = None if dist.get_rank() else print
        register(wrap(mlp()), TOPK, guard=Guard(callback=callback)).close()

    on_threads(2, body)


def accused(exchange, guard, parts):
    """Train; at each comparison, the guard believes that other parameters are wrong."""
    averager = small.averager(exchange, TOPK)
    watched = watch(averager, guard)
    genuine = watched.after
    for number, names in enumerate(parts):
        watched.after = genuine
        for name in names:
            accuse(averager, name)
        small.train(averager, 2 * number, 2 * number + 2)
    averager.settle()
    return watched.alarms


def test_the_callback_is_called_on_each_rank_once_for_each_new_alarm():
    def body(exchange):
        told = []
        guard = Guard(every=2, callback=told.append)
        parts = [(), ("conv",), ("conv",), ("conv", "matrix"), ("matrix",), (), ("matrix",)]
        last = accused(exchange, guard, parts)
        return [(alarm.step, alarm.kind, alarm.parameters) for alarm in told], last[0].parameters

    expected = [(4, ("conv",)), (8, ("conv", "matrix")), (14, ("matrix",))]
    told = [(step, "imbalance", names) for step, names in expected]
    assert small.on_ranks(3, body) == [(told, ("matrix",))] * 3


def test_by_default_rank_0_logs_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "torchcomp"):
        alarms = small.on_ranks(3, lambda e: accused(e, Guard(every=2), [("conv",), ("conv",)]))
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("torchcomp.guard.observer", "WARNING")
    assert "'conv'" in record.getMessage()
    assert "step 2" in record.getMessage()
    assert all(each == alarms[0] for each in alarms)


class Stop(Exception):
    """Raised by a callback, to end a training."""


def test_an_error_of_the_callback_reaches_the_user_on_each_rank_and_the_run_can_go_on():
    def body():
        def stop(alarm):
            raise Stop(alarm.kind)

        model = wrap(mlp())
        handle = register(model, TOPK, guard=Guard(every=2, callback=stop))
        for step in range(6):
            if step == 1:
                with torch.no_grad():
                    model.module[0].bias[0] += dist.get_rank()
            if step == 3:
                with pytest.raises(Stop, match="replicas"):
                    loss_of(model(rows(step))).backward()
            loss_of(model(rows(step))).backward()
        handle.close()
        return handle.averager.step, [alarm.kind for alarm in handle.guard.alarms]

    assert on_threads(2, body) == [(6, ["replicas"])] * 2
