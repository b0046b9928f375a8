"""What is judged to be wrong, from measured values."""

import itertools
import random

import pytest

from tests.advisor.doctor.cases import facts, link, mesh
from torchcomp.advisor.doctor import findings
from torchcomp.advisor.doctor.clocks import Clock
from torchcomp.advisor.doctor.preflight import Unreachable
from torchcomp.advisor.doctor.speed import Speed


def named(found):
    return [(finding.code, finding.ranks) for finding in found]


def test_equal_ranks_have_no_findings():
    speeds = [Speed((1.0, 1.1), 1.0)] * 3
    assert findings.of_facts(facts(3)) == []
    assert findings.of_links(mesh(3)) == []
    assert findings.of_speeds(speeds) == findings.of_speeds(speeds[:1]) == []
    assert findings.of_clocks([Clock(0.0, 0.0), Clock(0.09, 1e-4)]) == []
    assert findings.of_connections([]) == []


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_noise_below_a_factor_of_two_is_not_found(world_size):
    draw = random.Random(world_size)
    for _ in range(100):
        links = mesh(world_size, lambda *_: draw.uniform(51, 100), trip=draw.uniform(1e-5, 1e-3))
        assert findings.of_links(links) == []


# --- Links ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [3, 4, 16])
def test_one_slow_link_is_named_in_its_direction(world_size):
    links = mesh(world_size, lambda i, j: 10.0 if (i, j) == (2, 1) else 100.0)
    assert named(findings.of_links(links)) == [("slow-link", (2, 1))]
    assert findings.suspects(links) == [(1, 2)]


@pytest.mark.parametrize(("world_size", "way"), [*itertools.product([3, 4, 16], ["from", "to"])])
def test_a_rank_with_slow_links_is_named_once(world_size, way):
    links = mesh(world_size, lambda i, j: 10.0 if (i if way == "from" else j) == 1 else 100.0)
    found = findings.of_links(links)
    assert named(found) == [("slow-links", (1,))]
    assert f" {way} rank 1 " in found[0].text
    assert all(text in found[0].text for text in ("80 Mbit/s", "800 Mbit/s"))


def test_two_ranks_compare_their_two_directions():
    links = [link(0, 1, 100.0), link(1, 0, 10.0)]
    assert {finding.ranks for finding in findings.of_links(links)} <= {(0,), (1,)}
    assert findings.of_links(links)


def test_links_inside_nodes_are_not_compared_with_those_between_nodes():
    inside = [link(0, 1, 5000.0, inside=True), link(1, 0, 5000.0, inside=True)]
    between = [link(i, j) for i, j in itertools.permutations(range(4), 2) if {i, j} != {0, 1}]
    assert findings.of_links(inside + between) == []


def test_links_that_only_a_core_limits_are_not_compared():
    links = mesh(4, lambda i, j: 2500.0 if (i, j) == (0, 1) else 9000.0)
    assert named(findings.of_links(links)) == [("slow-link", (0, 1))]
    assert findings.of_links(links, findings.TCP_FASTEST) == []


def test_late_links_are_named_for_a_pair_or_a_rank():
    far = [link(i, j, trip=0.05 if {i, j} == {0, 2} else 1e-4) for i, j in pairs(4)]
    assert named(findings.of_links(far)) == [("late-link", (0, 2)), ("late-link", (2, 0))]
    far = [link(i, j, trip=0.05 if 3 in (i, j) else 1e-4) for i, j in pairs(4)]
    assert named(findings.of_links(far)) == [("late-links", (3,))]
    # Many times the others, but no millisecond.
    near = [link(i, j, trip=1e-3 if 3 in (i, j) else 1e-5) for i, j in pairs(4)]
    assert findings.of_links(near) == []


def pairs(world_size):
    return itertools.permutations(range(world_size), 2)


def test_a_link_that_failed_is_named_and_not_measured_again():
    links = [*mesh(3), link(1, 2, error="timed out")]
    found = findings.of_links(links)
    assert named(found) == [("lost-link", (1, 2))]
    assert "timed out" in found[0].text
    assert findings.suspects(links) == []


# --- Connections ----------------------------------------------------------------------------------


def failed(source, target, *, answers=False, address="10.0.0.2:40000"):
    return Unreachable(source, target, address, "no answer within 10.5 s", answers)


def test_a_dead_link_is_one_finding_with_both_ranks():
    (found,) = findings.of_connections([failed(1, 2), failed(2, 1)])
    assert (found.code, found.ranks, found.fatal) == ("dead-link", (1, 2), True)


@pytest.mark.parametrize("ways", [[failed(1, 2)], [failed(1, 2, answers=True), failed(2, 1)]])
def test_a_port_is_blocked_if_one_direction_works_or_the_host_answers(ways):
    (found,) = findings.of_connections(ways)
    assert (found.code, found.ranks, found.fatal) == ("blocked-port", (1, 2), True)


def test_a_rank_that_no_other_reaches_is_named_alone():
    ways = [failed(source, 3) for source in range(3)] + [failed(3, target) for target in range(3)]
    assert named(findings.of_connections(ways)) == [("dead-link", (3,))]
    assert named(findings.of_connections([failed(i, 3) for i in range(3)])) == [
        ("blocked-port", (3,))
    ]


def test_several_dead_links_are_a_finding_each():
    ways = [failed(*pair) for pair in ((0, 1), (1, 0), (2, 3), (3, 2))]
    assert named(findings.of_connections(ways)) == [("dead-link", (0, 1)), ("dead-link", (2, 3))]


def test_an_address_of_the_loopback_gets_the_variable_that_changes_it():
    (found,) = findings.of_connections([failed(0, 1, address="127.0.1.1:40000")])
    assert "GLOO_SOCKET_IFNAME" in found.advice


# --- Ranks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "odd"),
    [
        ("versions", {"torch": "2.12.0"}),
        ("versions", {"torchcomp": "0.0.9"}),
        ("versions", {"python": "3.12.1"}),
        ("versions", {"nccl": "2.27"}),
        ("versions", {"driver": "535.1"}),
        ("gpus", {"gpu": "another"}),
        ("cores", {"cores": 4}),
        ("threads", {"threads": 4}),
        ("kernels", {"kernels": "plain torch"}),
        ("mtu", {"mtu": 9000}),
        ("shm", {"shm_free": 2**20}),
    ],
)
def test_a_rank_that_differs_is_named(code, odd):
    found = findings.of_facts(facts(4, **odd))
    assert named(found) == [(code, (3,))]
    assert "3" in found[0].text
    assert not found[0].fatal


def test_no_shm_at_all_is_not_a_small_one():
    assert findings.of_facts(facts(2, shm_bytes=-1, shm_free=-1)) == []


def test_a_slow_rank_is_named_with_its_factor_and_its_share_of_the_cores():
    speeds = [Speed((1.0, 1.1), 1.0), Speed((4.0, 4.4), 0.25), Speed((1.0, 1.2), 1.0)]
    (found,) = findings.of_speeds(speeds)
    assert (found.code, found.ranks) == ("slow-rank", (1,))
    assert "3.9x" in found.text
    assert "25%" in found.advice


def test_a_rank_is_not_slow_if_the_others_are_sometimes_as_slow():
    noisy = Speed((1.0, 1.0, 3.2, 3.2), 1.0)
    assert findings.of_speeds([noisy, Speed((4.0,) * 4, 1.0), noisy]) == []
    # If it is sometimes as fast as they are, neither.
    quiet = Speed((1.0,) * 4, 1.0)
    assert findings.of_speeds([quiet, Speed((1.0, 1.2, 9.0, 9.0), 1.0), quiet]) == []
    assert named(findings.of_speeds([quiet, Speed((1.4, 1.4, 1.4, 9.0), 1.0), quiet])) == [
        ("slow-rank", (1,))
    ]


@pytest.mark.parametrize("offset", [-60.0, 0.2])
def test_a_clock_that_differs_is_named(offset):
    clocks = [Clock(0.0, 0.0), Clock(0.0, 1e-4), Clock(offset, 1e-4)]
    assert named(findings.of_clocks(clocks)) == [("clock", (2,))]


def test_a_clock_may_differ_by_the_error_of_its_measurement():
    assert findings.of_clocks([Clock(0.0, 0.0), Clock(0.5, 0.45)]) == []
    assert findings.of_clocks([Clock(0.0, 0.0), Clock(float("nan"), 0.0)]) == []
