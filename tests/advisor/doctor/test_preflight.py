"""The store and the pre-flight: missing ranks and connections that fail have names."""

import socket
import threading

import pytest
import torch.distributed as dist

from torchcomp.advisor.doctor.addresses import interface_of, mtu_of, own_address
from torchcomp.advisor.doctor.clocks import measure_clocks
from torchcomp.advisor.doctor.job import Job, NotMeasured, join, ranks_named
from torchcomp.advisor.doctor.preflight import Connections
from torchcomp.errors import SpecError


def jobs(world_size, timeout=5.0):
    store = dist.HashStore()
    return [Job(rank, world_size, rank, 0, "gloo", timeout, store) for rank in range(world_size)]


def at_once(function, *columns):
    """Call a function in a thread for each row; return the results, or raise the first error."""
    results = [None] * len(columns[0])

    def run(index, row):
        try:
            results[index] = function(*row)
        except Exception as error:
            results[index] = error

    threads = [
        threading.Thread(target=run, args=(index, row))
        for index, row in enumerate(zip(*columns, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


@pytest.fixture
def on_loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.mark.usefixtures("on_loopback")
def test_every_pair_has_one_connection_and_clocks_agree():
    ranks = jobs(3)
    connections = [Connections(job) for job in ranks]
    assert at_once(Connections.connect, connections) == [[], [], []]
    for one in range(3):
        for other in range(one + 1, 3):
            here, there = connections[one].between(other), connections[other].between(one)
            assert here.getsockname() == there.getpeername()
    clocks = at_once(measure_clocks, ranks, connections)
    assert clocks[0] == clocks[1] == clocks[2]
    assert len(clocks[0]) == 3
    for each in connections:
        each.close()


@pytest.mark.usefixtures("on_loopback")
def test_all_ranks_name_the_connections_that_fail():
    connections = [Connections(job) for job in jobs(3)]
    # close() would leave it to the thread that accepts.
    connections[1]._listener.shutdown(socket.SHUT_RDWR)
    failed = at_once(Connections.connect, connections)
    assert failed[0] == failed[1] == failed[2]
    assert [(each.source, each.target) for each in failed[0]] == [(0, 1), (2, 1)]
    assert all("127.0.0.1" in each.address and each.reason for each in failed[0])
    for each in connections:
        each.close()


def test_missing_ranks_are_named():
    with pytest.raises(NotMeasured, match="ranks 0, 2 of 3"):
        jobs(3)[1].gather("facts", 1, seconds=0.1)


def test_one_rank_is_the_first():
    ranks = jobs(3)
    assert [ranks[rank].is_first("report") for rank in (2, 0, 1)] == [True, False, False]
    assert ranks[1].is_first("another")


def test_gather_returns_values_in_rank_order():
    assert at_once(lambda job: job.gather("x", job.rank**2), jobs(3)) == [[0, 1, 4]] * 3


def test_a_process_without_torchrun_is_alone():
    job = join("gloo", 5.0)
    assert (job.rank, job.world_size, job.node) == (0, 1, 0)
    assert job.gather("x", "y") == ["y"]


def test_a_store_that_cannot_be_reached_is_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**environment, "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NotMeasured, match=r"rank 1 .*127\.0\.0\.1:"):
        join("gloo", 0.1)


def test_the_address_is_that_of_the_interface_that_gloo_takes():
    assert own_address("gloo", {"GLOO_SOCKET_IFNAME": "lo"}) == "127.0.0.1"
    assert own_address("nccl", {"NCCL_SOCKET_IFNAME": "=lo"}) == "127.0.0.1"
    assert own_address("nccl", {"MASTER_ADDR": "127.0.0.1"}) == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert mtu_of("lo") > 0
    assert (interface_of("192.0.2.1"), mtu_of("no such")) == ("", 0)
    with pytest.raises(SpecError, match="GLOO_SOCKET_IFNAME=none7"):
        own_address("gloo", {"GLOO_SOCKET_IFNAME": "none7"})


@pytest.mark.parametrize(
    ("ranks", "words"),
    [([3], "rank 3"), ([2, 0, 1], "ranks 0-2"), ([0, 2, 3, 7], "ranks 0, 2-3, 7")],
)
def test_ranks_are_named_in_runs(ranks, words):
    assert ranks_named(ranks) == words
