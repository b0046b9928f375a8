"""The rules of a trial: which method each step times, which is chosen, when to look again."""

from dataclasses import asdict

import pytest

from tests.support.outcomes import raised_by
from torchcomp import SpecError
from torchcomp.auto import Choice, Pace, Timed, Trial, chosen
from torchcomp.auto.pace import WINDOW


def step(seconds: float, waiting: float = 0.0, average: float = 0.0) -> Timed:
    end = seconds + average
    return Timed(0.0, seconds - waiting, seconds, end)


def run(seconds: list[float], steps: int = 100) -> tuple[list[int], list[int]]:
    """Run a trial of methods that take these times; return the method of each step, the result."""
    trial, order = Trial(len(seconds), steps), []
    while True:
        order.append(trial.method)
        if trial.add(step(seconds[trial.method], average=0.5)):
            agreed = trial.measured()
            if trial.end_round(agreed):
                return order, agreed


def test_a_round_times_each_method_in_order() -> None:
    order, _ = run([1.0, 1.0, 1.0])
    assert len(order) <= 100
    blocks = [each for _ in range(2) for method in range(3) for each in [method] * 16]
    assert order == [0] * 4 + blocks


@pytest.mark.parametrize("methods", [2, 3, 5, 7])
def test_a_block_counts_as_many_even_as_odd_steps(methods: int) -> None:
    """In some loops, short and long steps alternate."""
    trial, number = Trial(methods, 100), 0
    while not trial.add(step(1.0 + number % 2)):
        number += 1
    assert number < 100
    assert trial.measured()[:methods] == [1.5e9] * methods


def test_the_second_round_is_for_methods_that_are_close_to_the_best() -> None:
    order, agreed = run([3.0, 1.0, 1.3, 1.2])
    assert order[-36:] == [0] * 12 + [1] * 12 + [3] * 12
    assert agreed[:4] == [3 * 10**9, 10**9, 1.3 * 10**9, 1.2 * 10**9]


def test_first_steps_of_a_block_do_not_count() -> None:
    trial = Trial(2, 20)
    for number in range(4 + 2 * 4):
        slow = number < 6 or number in (8, 9)
        ended = trial.add(step(9.0 if slow else 1.0))
        assert ended == (number == 11)
    assert trial.measured()[:2] == [10**9, 10**9]


def test_a_block_begins_again_after_a_step_that_failed() -> None:
    trial = Trial(2, 20)
    for _ in range(8):
        trial.add(step(1.0))
    assert trial.method == 1
    trial.add(step(1.0))
    trial.restart_block()
    assert [trial.add(step(1.0)) for _ in range(4)] == [False, False, False, True]


@pytest.mark.parametrize(("methods", "steps"), [(2, 19), (5, 43), (13, 100)])
def test_too_few_steps_are_refused(methods: int, steps: int) -> None:
    error = raised_by(lambda: Trial(methods, steps))
    assert isinstance(error, SpecError)
    assert str(4 + 8 * methods) in str(error)
    Trial(methods, 4 + 8 * methods)


def test_copying_and_the_second_average_are_not_counted() -> None:
    timed = Timed(before=1.0, computed=3.0, averaged=4.0, end=6.0, copying=0.5)
    assert (timed.seconds, timed.alone, timed.average) == (2.5, 1.5, 2.0)
    # The average can end before the backward pass.
    assert Timed(0.0, 2.0, 2.0, 2.0).alone == 2.0


@pytest.mark.parametrize(
    ("seconds", "index"),
    [
        ([1.0, 0.96, 0.99], 0),  # not worth it
        ([1.0, 0.9, 0.87], 1),  # the second is liked more, and hardly slower
        ([1.0, 0.9, 0.5], 2),
        ([1.0, 1.5, 0.9], 2),
        ([1.0], 0),
    ],
)
def test_the_first_method_is_chosen_that_no_other_is_worth_changing_for(
    seconds: list[float], index: int
) -> None:
    assert chosen(seconds) == index


def test_a_choice_says_what_was_measured_and_proposes_local_steps() -> None:
    seconds = {"mean": 0.2, "powersgd(1)": 0.1}
    text = str(Choice("powersgd(1)", seconds, alone=0.05, average=0.16, step=96))
    for part in ("step 97", "powersgd(1)", "2.00 times", "200 ms", "100 ms", "every(8)", "70 ms"):
        assert part in text
    text = str(Choice("mean", seconds | {"powersgd(1)": 0.196}, 0.19, 0.16, 96))
    assert "1.02" in text
    assert "every(8)" not in text
    assert Choice(**asdict(Choice("mean", seconds, 0.1, 0.2, 3))).seconds == seconds


@pytest.mark.parametrize(
    ("seconds", "changed"),
    [(1.4, False), (1.6, True), (0.6, False), (0.4, True)],
)
def test_a_pace_changes_by_half(seconds: float, changed: bool) -> None:
    pace = Pace(reference=10**9)
    for _ in range(WINDOW):
        assert pace.flags() == []
        pace.add(step(seconds))
    assert Pace.changed(pace.flags()) == changed
    assert not pace.full


def test_the_slowest_rank_decides_on_the_pace() -> None:
    flags = []
    for seconds in (0.4, 0.8):
        pace = Pace(reference=10**9)
        for _ in range(WINDOW):
            pace.add(step(seconds))
        flags.append(pace.flags())
    assert not Pace.changed([max(each) for each in zip(*flags, strict=True)])
