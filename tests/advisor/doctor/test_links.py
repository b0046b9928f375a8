"""Links: which pairs are measured when, and what one measurement gives."""

import itertools
import socket
import threading
import time

import pytest

from tests.advisor.doctor.cases import link
from tests.support.patience import PATIENCE
from torchcomp.advisor.doctor.measures import Channel, Link, chosen_pairs, echo, probe, rounds


@pytest.mark.parametrize(
    ("world_size", "node", "most"), [(2, 1, 1), (4, 1, 4), (16, 16, 23), (8, 2, 16), (64, 8, 400)]
)
def test_no_two_pairs_of_a_round_share_a_rank_or_a_card(world_size, node, most):
    nodes = [rank // node for rank in range(world_size)]
    pairs = chosen_pairs(world_size)
    # All pairs up to 16 ranks, and a connected sample above.
    every = list(itertools.combinations(range(world_size), 2))
    assert pairs == (every if world_size <= 16 else chosen_pairs(world_size))
    assert {(rank, rank + 1) for rank in range(world_size - 1)} <= set(pairs) <= set(every)
    assert len(pairs) <= 4 * world_size or world_size <= 16
    made = rounds(pairs, nodes)
    assert sorted(pair for members in made for pair in members) == sorted(pairs)
    assert len(made) <= most
    for members in made:
        ranks = [rank for pair in members for rank in pair]
        assert len(ranks) == len(set(ranks))
        crossing = [{nodes[i], nodes[j]} for i, j in members if nodes[i] != nodes[j]]
        assert all(not one & other for one, other in itertools.combinations(crossing, 2))


@pytest.fixture
def ends():
    """Both ends of a TCP connection."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as first,
        server.accept()[0] as second,
    ):
        yield first, second


class Slow(Channel):
    """A link of 10 MB/s."""

    def send(self, nbytes):
        time.sleep(nbytes / 10e6)
        super().send(nbytes)


@pytest.mark.parametrize(("channel", "largest"), [(Channel, 2**24), (Slow, 2**20)])
def test_a_probe_measures_growing_messages_and_a_slow_link_by_small_ones(ends, channel, largest):
    answers = threading.Thread(target=echo, args=(Channel(ends[1], PATIENCE),))
    answers.start()
    trip, points = probe(channel(ends[0], PATIENCE), 0.05)
    answers.join()
    sizes = [nbytes for nbytes, _ in points]
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1] <= largest) == (2**12, True)
    assert all(seconds > 0 for seconds in (trip, *(seconds for _, seconds in points)))
    measured = Link(0, 1, False, 0.0, tuple(points))
    assert channel is Channel or measured.bandwidth <= 10e6


def test_a_silent_link_ends_with_an_error(ends):
    with pytest.raises(TimeoutError):
        Channel(ends[0], 0.1).receive()
    ends[1].close()
    with pytest.raises(ConnectionError):
        Channel(ends[0], 0.1).receive()


def test_the_better_of_two_measurements_has_the_best_of_both():
    fast, near = link(0, 1, 100.0, trip=2e-3), link(0, 1, 50.0, trip=1e-3)
    both = fast.better_of(near)
    assert (both.round_trip, both.points) == (1e-3, fast.points)
    failed = link(0, 1, error="timed out")
    assert failed.better_of(near) == near.better_of(failed) == near
