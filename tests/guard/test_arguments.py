"""The argument of register, its errors, and what the callback is told."""

import logging
import math

import pytest
import torch.distributed as dist

from tests.engine import small
from tests.guard.runs import accuse
from tests.support.models import loss_of, mlp, rows, wrap
from tests.support.outcomes import assert_refused
from tests.support.ranks import on_threads
from torchcomp import Guard, Handle, RankMismatchError, SpecError, register, watch

TOPK = "ef(topk(0.1))"


@pytest.mark.parametrize(
    ("field", "value"),
    [("every", 0), ("every", 2.5), ("every", True), ("age", 0), ("callback", "print")],
)
def test_bad_options_are_refused(field, value):
    with pytest.raises(SpecError, match=field) as caught:
        Guard(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize("value", ["yes", 1, 0, {"every": 50}, Guard])
def test_what_is_no_guard_is_refused_on_all_ranks(value):
    def body():
        register(wrap(mlp()), TOPK, guard=value)

    assert_refused(2, body, SpecError, "guard", repr(value), field="guard")


@pytest.mark.parametrize("value", [False, Guard(every=7)])
def test_ranks_with_other_guards_are_refused(value):
    def body():
        # Each rank has a callback of its own.
        own = Guard(callback=print if dist.get_rank() else None)
        register(wrap(mlp()), TOPK, guard=value if dist.get_rank() == 1 else own)

    assert_refused(3, body, RankMismatchError, "guard", "rank 1")


@pytest.mark.parametrize("judge", [Handle.state_dict, Handle.close])
def test_a_state_or_the_end_judges_the_last_comparison_and_a_mean_has_no_age(judge):
    def body():
        model = wrap(mlp())
        handle = register(model, "mean", guard=Guard(every=2))
        for step in range(2):
            loss_of(model(rows(step))).backward()
        assert handle.guard.report is None
        judge(handle)
        report = handle.guard.report
        assert (report.step, report.model.cosine) == (2, pytest.approx(1.0))
        assert math.isnan(report.model.old)
        handle.close()

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


def test_the_callback_is_called_once_for_each_new_alarm_and_rank_0_logs_it_without_one(caplog):
    def body(exchange):
        told = []
        guard = Guard(every=2, callback=told.append)
        parts = [(), ("conv",), ("conv",), ("conv", "matrix"), ("matrix",), (), ("matrix",)]
        last = accused(exchange, guard, parts)
        return [(alarm.step, alarm.kind, alarm.parameters) for alarm in told], last[0].parameters

    expected = [(4, ("conv",)), (8, ("conv", "matrix")), (14, ("matrix",))]
    told = [(step, "imbalance", names) for step, names in expected]
    assert small.on_ranks(3, body) == [(told, ("matrix",))] * 3
    with caplog.at_level(logging.WARNING, "torchcomp"):
        alarms = small.on_ranks(3, lambda e: accused(e, Guard(every=2), [("conv",), ("conv",)]))
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("torchcomp.guard.observer", "WARNING")
    assert all(word in record.getMessage() for word in ("'conv'", "step 2"))
    assert all(each == alarms[0] for each in alarms)


@pytest.mark.parametrize("at_the_end", [False, True])
def test_an_error_of_the_callback_reaches_the_user_after_all_alarms_were_told(at_the_end):
    """The run can go on, or its end leaves nothing open."""

    def body():
        told, rank = set(), dist.get_rank()

        def callback(alarm):
            told.add(alarm.kind)
            raise ValueError(alarm.kind)

        model = wrap(mlp())
        handle = register(model, "mean", guard=Guard(every=2, callback=callback))
        accuse(handle.averager, "2.weight")
        for step in range(2):
            model.zero_grad()
            (loss_of(model(rows(step))) * (rank != 1)).backward()
        with pytest.raises(ValueError, match=r"imbalance|silent rank"):
            handle.close() if at_the_end else loss_of(model(rows(2))).backward()
        if not at_the_end:
            loss_of(model(rows(2))).backward()
        handle.close()
        return told >= {"imbalance", "silent rank"}, handle.closed, handle.averager.step

    assert on_threads(3, body) == [(True, True, 2 if at_the_end else 3)] * 3
