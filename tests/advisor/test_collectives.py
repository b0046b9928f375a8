"""The measured times of collectives: curves, and one result on all ranks."""

import pytest

from torchcomp.advisor import CollectiveTimes, measure_collectives
from torchcomp.advisor.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, KINDS, Point
from torchcomp.exchange import run_in_process
from torchcomp.specs.errors import SpecError


def times(*rows):
    return CollectiveTimes(4, {ALL_REDUCE: tuple(Point(*row) for row in rows)})


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [
        # Straight between the points, and beyond the last with the median slope of the last three.
        (
            [(100, 1.0), (200, 2.0), (400, 6.0)],
            {0: 1.0, 100: 1.0, 150: 1.5, 200: 2.0, 300: 4.0, 400: 6.0, 700: 10.5},
        ),
        # Points that descend are averaged.
        ([(100, 1.0), (200, 4.0), (300, 2.0), (400, 5.0)], {100: 1, 200: 3, 250: 3, 300: 3}),
        # Beyond the last point, a time at most doubles with the size.
        ([(100, 1.0), (110, 9.0)], {220: 18.0}),
        ([(100, 2.0)], {10**9: 2.0}),
    ],
)
def test_a_curve_goes_through_its_points(rows, seconds):
    curve = times(*rows)
    assert {n: pytest.approx(curve.seconds(ALL_REDUCE, n)) for n in seconds} == seconds


def test_a_small_all_gather_is_an_all_to_all_with_copies():
    whole = {ALL_TO_ALL: (Point(100, 1.0), Point(1100, 11.0)), ALL_GATHER: (Point(1000, 7.0),)}
    curve = CollectiveTimes(4, whole)
    assert curve.seconds(ALL_GATHER, 200) == pytest.approx(6.0)
    assert curve.seconds(ALL_GATHER, 1000) == 7.0
    without = CollectiveTimes(4, {ALL_TO_ALL: whole[ALL_TO_ALL]})
    assert without.seconds(ALL_GATHER, 1000) == pytest.approx(30.0)


def test_a_short_curve_has_the_bandwidth_of_one_that_reaches_further():
    far = (Point(100, 1.0), Point(200, 2.0), Point(100_000, 50_000.9))
    curve = CollectiveTimes(4, {ALL_TO_ALL: far, ALL_REDUCE: (Point(100, 1.0), Point(200, 1.1))})
    # 0.5 s for each byte that a rank sends: 2 * 3/4 of a message in an all-reduce.
    assert curve.seconds(ALL_REDUCE, 300) > curve.seconds(ALL_REDUCE, 200) + 0.5


def test_the_cpu_has_a_curve_of_its_own_and_is_never_above_the_seconds():
    curve = times((100, 1.0, 0.5), (200, 2.0, 1.0), (300, 2.5, 2.4))
    assert curve.cpu(ALL_REDUCE, 150) == pytest.approx(0.75)
    assert curve.cpu(ALL_REDUCE, 1000) == curve.seconds(ALL_REDUCE, 1000) == pytest.approx(7.75)
    assert curve.to_dict()["points"] == {
        ALL_REDUCE: [[100, 1.0, 0.5], [200, 2.0, 1.0], [300, 2.5, 2.4]]
    }


@pytest.mark.parametrize("ranks", [1, 3])
def test_all_ranks_measure_the_same(ranks):
    def body(exchange):
        with pytest.raises(SpecError, match="seconds"):
            measure_collectives(exchange, seconds=0)
        found = measure_collectives(exchange, seconds=0.5, stopwatch=lambda: lambda: 1e9)
        return found, exchange.take_traffic(0).sent

    results = run_in_process(ranks, body)
    times = results[0][0]
    assert results == [(times, 0)] * ranks
    assert (times.world_size, set(times.points)) == (ranks, set(KINDS))
    # A stopwatch counts at most the seconds of the clock.
    assert all(0 < p.cpu == p.seconds for points in times.points.values() for p in points)
