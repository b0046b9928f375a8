"""The measured times of collectives: curves, plain dicts, bad input, one result on all ranks."""

import json

import pytest

from torchcomp.errors import SpecError
from torchcomp.exchange import run_in_process
from torchcomp.step_model import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    KINDS,
    CollectiveTimes,
    Point,
    measure_collectives,
)


def times(*rows):
    return CollectiveTimes(4, {ALL_REDUCE: tuple(Point(*row) for row in rows)})


@pytest.mark.parametrize(
    ("nbytes", "seconds"),
    [(0, 1.0), (100, 1.0), (150, 1.5), (200, 2.0), (300, 4.0), (400, 6.0), (700, 10.5)],
)
def test_a_curve_is_straight_between_its_points_and_beyond_the_last(nbytes, seconds):
    curve = times((100, 1.0), (200, 2.0), (400, 6.0))
    assert curve.seconds(ALL_REDUCE, nbytes) == pytest.approx(seconds)


def test_a_small_all_gather_is_an_all_to_all_with_copies():
    whole = {ALL_TO_ALL: (Point(100, 1.0), Point(1100, 11.0)), ALL_GATHER: (Point(1000, 7.0),)}
    curve = CollectiveTimes(4, whole)
    assert curve.seconds(ALL_GATHER, 200) == pytest.approx(6.0)
    assert curve.seconds(ALL_GATHER, 1000) == 7.0
    without = CollectiveTimes(4, {ALL_TO_ALL: whole[ALL_TO_ALL]})
    assert without.seconds(ALL_GATHER, 1000) == pytest.approx(30.0)


def test_points_that_descend_are_averaged():
    curve = times((100, 1.0), (200, 4.0), (300, 2.0), (400, 5.0))
    assert [curve.seconds(ALL_REDUCE, n) for n in (100, 200, 250, 300, 400)] == [1, 3, 3, 3, 5]


def test_beyond_the_last_point_a_time_at_most_doubles_with_the_size():
    assert times((100, 1.0), (110, 9.0)).seconds(ALL_REDUCE, 220) == pytest.approx(18.0)


def test_one_point_holds_for_all_sizes():
    assert times((100, 2.0)).seconds(ALL_REDUCE, 10**9) == 2.0


def test_the_cpu_has_a_curve_of_its_own_and_is_never_above_the_seconds():
    curve = times((100, 1.0, 0.5), (200, 2.0, 1.0), (300, 2.5, 2.4))
    assert curve.cpu(ALL_REDUCE, 150) == pytest.approx(0.75)
    assert curve.cpu(ALL_REDUCE, 1000) == curve.seconds(ALL_REDUCE, 1000) == pytest.approx(7.75)


def test_times_survive_json():
    curve = times((100, 1.0, 0.5), (200, 2.0))
    assert CollectiveTimes.from_dict(json.loads(json.dumps(curve.to_dict()))) == curve


@pytest.mark.parametrize(
    "bad",
    [
        lambda: times((200, 1.0), (100, 2.0)),
        lambda: times((100, 1.0), (100, 2.0)),
        lambda: times(),
        lambda: times((100, 0.0)),
        lambda: times((100, 1.0, -1.0)),
        lambda: times((1.5, 1.0)),
        lambda: CollectiveTimes(0, {}),
        lambda: CollectiveTimes(2, {"broadcast": (Point(1, 1.0),)}),
        lambda: times((100, 1.0)).seconds(ALL_GATHER, 1),
        lambda: times((100, 1.0)).seconds(ALL_REDUCE, -1),
        lambda: CollectiveTimes.from_dict({"points": {}}),
        lambda: CollectiveTimes.from_dict({"world_size": 2, "points": {ALL_REDUCE: [5]}}),
        lambda: CollectiveTimes.from_dict([]),
    ],
)
def test_bad_times_are_refused(bad):
    with pytest.raises(SpecError):
        bad()


def test_all_ranks_measure_the_same():
    def body(exchange):
        measured = measure_collectives(exchange, seconds=0.4)
        return measured, exchange.take_traffic(0).sent

    results = run_in_process(3, body)
    measured = results[0][0]
    assert results == [(measured, 0)] * 3
    assert measured.world_size == 3
    assert set(measured.points) == set(KINDS)
    for points in measured.points.values():
        assert all(0 <= point.cpu <= point.seconds for point in points)


def test_some_kinds_only():
    measured = run_in_process(
        2, lambda exchange: measure_collectives(exchange, seconds=0.05, kinds=[ALL_TO_ALL])
    )[0]
    assert list(measured.points) == [ALL_TO_ALL]


def test_the_time_of_the_host_is_at_least_that_of_the_process():
    def body(exchange):
        return measure_collectives(exchange, seconds=0.05, kinds=[ALL_REDUCE], host_ranks=1)

    (measured,) = run_in_process(1, body)
    assert all(0 < point.cpu <= point.seconds for point in measured.points[ALL_REDUCE])


@pytest.mark.parametrize(
    "bad", [{"host_ranks": 0}, {"seconds": 0}, {"seconds": "1"}, {"kinds": ["send"]}]
)
def test_bad_arguments_are_refused(bad):
    with pytest.raises(SpecError):
        run_in_process(1, lambda exchange: measure_collectives(exchange, **bad))
