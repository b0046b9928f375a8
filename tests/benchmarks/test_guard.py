"""The benchmark of the guard: its cases, its verdicts, and its page."""

from dataclasses import replace

import pytest

from benchmarks import guard, report_guard
from benchmarks.guard_faults import CULPRIT, FAULTS
from torchcomp import Alarm

OLD = Alarm(100, "residual changed", ("a", "b"), (CULPRIT,), 3.0, 0.0, "")
STARVED = Alarm(100, "starved", (guard.LAYER,), (0, 1), 1.0, 0.5, "")


def test_the_page_has_what_is_measured():
    assert report_guard.PAGE.filled() == report_guard.PAGE.text


def test_there_are_ten_faults_and_twenty_clean_runs():
    assert len(FAULTS) == 10
    assert len({" ".join(flags) for _, flags in guard.CLEAN}) == 20


@pytest.mark.parametrize(
    ("fault", "alarms", "passed"),
    [
        ("an old residual, once", [OLD], True),
        ("an old residual, once", [OLD, replace(OLD, kind="lost")], True),
        ("an old residual, once", [], False),
        ("an old residual, once", [replace(OLD, kind="imbalance")], False),
        ("an old residual, once", [replace(OLD, ranks=(0, CULPRIT))], False),
        ("an old residual, once", [replace(OLD, step=200)], False),
        ("an old residual, once", [replace(OLD, step=30), OLD], False),
        ("a layer is never sent", [STARVED], True),
        ("a layer is never sent", [replace(STARVED, parameters=("other",))], False),
        (guard.NO_FEEDBACK, [replace(OLD, kind="lost")], True),
        (guard.NO_FEEDBACK, [OLD], False),
    ],
)
def test_a_run_passes_if_the_first_alarms_are_right_and_in_time(fault, alarms, passed):
    row = guard.judged(fault, 40, [alarms, alarms])
    assert row["passed"] is passed
    assert row["after"] == (alarms[0].step - 40 if alarms else None)
    # All ranks must say the same.
    assert guard.judged(fault, 40, [alarms, [*alarms, OLD]])["passed"] is False
