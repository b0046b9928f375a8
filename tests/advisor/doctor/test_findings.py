"""What is judged to be wrong, from measured values."""

import itertools
import random

import pytest

from tests.advisor.doctor.cases import facts, link, mesh
from torchcomp.advisor.doctor import findings
from torchcomp.advisor.doctor.job import Unreachable
from torchcomp.advisor.doctor.measures import Clock, Speed


def named(found):
    return [(finding.code, finding.ranks) for finding in found]


def pairs(world_size):
    return itertools.permutations(range(world_size), 2)


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_noise_below_a_factor_of_two_is_not_found(world_size):
    draw = random.Random(world_size)
    for _ in range(100):
        links = mesh(world_size, lambda *_: draw.uniform(51, 100), trip=draw.uniform(1e-5, 1e-3))
        assert findings.of_links(links) == []


@pytest.mark.parametrize("world_size", [3, 4, 16])
def test_slow_links_are_named_one_by_one_or_by_their_rank(world_size):
    links = mesh(world_size, lambda i, j: 10.0 if (i, j) == (2, 1) else 100.0)
    assert named(findings.of_links(links)) == [("slow-link", (2, 1))]
    assert findings.suspects(links) == [(1, 2)]
    for way in ("from", "to"):
        links = mesh(world_size, lambda i, j: 10.0 if (i, j)[way == "to"] == 1 else 100.0)  # noqa: B023
        (found,) = findings.of_links(links)
        assert named([found]) == [("slow-links", (1,))]
        assert f" {way} rank 1 " in found.text
        assert all(text in found.text for text in ("80 Mbit/s", "800 Mbit/s"))
        assert findings.suspects(links) == [(0, 1), *((1, rank) for rank in range(2, world_size))]


def trips(late, others, mark):
    return [link(i, j, trip=late if mark(i, j) else others) for i, j in pairs(4)]


INSIDE = [link(*pair, 5000.0, inside=True) for pair in pairs(2)]
BUSY = mesh(4, lambda i, j: 2500.0 if (i, j) == (0, 1) else 9000.0)


@pytest.mark.parametrize(
    ("links", "found"),
    [
        # Links inside nodes are not compared with those between nodes.
        (INSIDE + [link(*p) for p in pairs(4) if max(p) > 1], []),
        # Two ranks compare their two directions.
        ([link(0, 1), link(1, 0, 10.0)], [("slow-links", (1,)), ("slow-links", (0,))]),
        # A core limits these, not the link.
        (BUSY, []),
        # A late pair and rank, and one that is late by less than a millisecond.
        (
            trips(0.05, 1e-4, lambda i, j: {i, j} == {0, 2}),
            [("late-link", (0, 2)), ("late-link", (2, 0))],
        ),
        (trips(0.05, 1e-4, lambda i, j: 3 in (i, j)), [("late-links", (3,))]),
        (trips(1e-3, 1e-5, lambda i, j: 3 in (i, j)), []),
        # A link that failed is not measured again.
        ([*mesh(3), link(1, 2, error="timed out")], [("lost-link", (1, 2))]),
    ],
)
def test_links_are_compared_with_others_of_their_kind(links, found):
    judged = findings.of_links(links)
    assert named(judged) == found
    assert all(each.fatal == (each.code == "lost-link") for each in judged)
    assert bool(findings.suspects(links)) == any(not each.fatal for each in judged)


def failed(source, target, *, answers=False, address="10.0.0.2:40000"):
    return Unreachable(source, target, address, "no answer within 10.5 s", answers)


@pytest.mark.parametrize(
    ("ways", "found"),
    [
        ([], []),
        ([failed(1, 2), failed(2, 1)], [("dead-link", (1, 2))]),
        # One direction works, or the host answers.
        ([failed(1, 2)], [("blocked-port", (1, 2))]),
        ([failed(1, 2, answers=True), failed(2, 1)], [("blocked-port", (1, 2))]),
        # A rank that no other reaches.
        ([failed(*pair) for pair in pairs(4) if 3 in pair], [("dead-link", (3,))]),
        ([failed(rank, 3) for rank in range(3)], [("blocked-port", (3,))]),
        (
            [failed(*pair) for pair in ((0, 1), (1, 0), (2, 3), (3, 2))],
            [("dead-link", (0, 1)), ("dead-link", (2, 3))],
        ),
    ],
)
def test_connections_that_failed_are_named_by_pairs_or_by_their_rank(ways, found):
    judged = findings.of_connections(ways)
    assert named(judged) == found
    assert all(each.fatal for each in judged)
    # An address of the loopback gets the variable that changes it.
    (local,) = findings.of_connections([failed(0, 1, address="127.0.1.1:40000")])
    assert "GLOO_SOCKET_IFNAME" in local.advice


ODD = [("backends", "backend", "nccl"), ("gpus", "gpu", "another"), ("mtu", "mtu", 9000)]
ODD += [("versions", name, "0") for name in ("torch", "torchcomp", "python", "nccl", "driver")]
ODD += [("cores", "cores", 4), ("threads", "threads", 4), ("kernels", "kernels", "plain torch")]


@pytest.mark.parametrize(("code", "fact", "value"), [*ODD, ("shm", "shm_free", 2**20)])
def test_a_rank_that_differs_is_named(code, fact, value):
    (found,) = findings.of_facts(facts(4, **{fact: value}))
    assert named([found]) == [(code, (3,))]
    assert "3" in found.text
    assert found.fatal == (code == "backends")
    assert findings.of_facts(facts(2, shm_bytes=-1, shm_free=-1)) == []


QUIET, NOISY = Speed((1.0,) * 4, 1.0), Speed((1.0, 1.0, 3.2, 3.2), 1.0)


@pytest.mark.parametrize(
    ("speeds", "found"),
    [
        ([QUIET], []),
        ([QUIET, QUIET, QUIET], []),
        ([QUIET, Speed((1.4, 1.4, 1.4, 9.0), 1.0), QUIET], [("slow-rank", (1,))]),
        # The others are sometimes as slow, or this one is sometimes as fast.
        ([NOISY, Speed((4.0,) * 4, 1.0), NOISY], []),
        ([QUIET, Speed((1.0, 1.2, 9.0, 9.0), 1.0), QUIET], []),
    ],
)
def test_a_rank_is_slow_at_its_best_against_the_others_at_their_worst(speeds, found):
    assert named(findings.of_speeds(speeds)) == found
    (slow,) = findings.of_speeds([QUIET, Speed((3.9,) * 4, 0.25), QUIET])
    assert "3.9x" in slow.text
    assert "25%" in slow.advice


@pytest.mark.parametrize(
    ("offset", "error", "skewed"),
    [(-60, 0, True), (0.2, 0, True), (0.09, 0, False), (0.5, 0.45, False)],
)
def test_a_clock_that_differs_is_named(offset, error, skewed):
    clocks = [Clock(0.0, 0.0), Clock(offset, error), Clock(0.0, 1e-4)]
    assert named(findings.of_clocks(clocks)) == [("clock", (1,))] * skewed
