"""The store and the pre-flight: missing ranks and connections that fail have names."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from torchcomp.advisor.doctor import measures
from torchcomp.advisor.doctor.job import Connections, Job, NotMeasured, interface_of, join
from torchcomp.advisor.doctor.job import own_address as address_of
from torchcomp.advisor.doctor.measures import Facts, measure_clocks, measure_speed, own_facts
from torchcomp.specs.errors import SpecError


def jobs(world_size, timeout=5.0):
    store = dist.HashStore()
    return [Job(rank, world_size, rank, 0, "gloo", timeout, store) for rank in range(world_size)]


def at_once(function, *columns):
    """Call a function in a thread for each row; return the results, or raise the first error."""
    with ThreadPoolExecutor(len(columns[0])) as threads:
        return list(threads.map(function, *columns))


@pytest.fixture
def connections(monkeypatch):
    """Those of three ranks on the loopback."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    made = [Connections(job) for job in jobs(3)]
    yield made
    for each in made:
        each.close()


def test_every_pair_has_one_connection_and_clocks_agree(connections):
    assert at_once(Connections.connect, connections) == [[], [], []]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        here, there = connections[one].between(other), connections[other].between(one)
        assert here.getsockname() == there.getpeername()
    clocks = at_once(measure_clocks, [each.job for each in connections])
    assert clocks[0] == clocks[1] == clocks[2]
    assert len(clocks[0]) == 3
    assert all(abs(each.offset) <= each.error for each in clocks[0])


def test_all_ranks_name_the_connections_that_fail(connections):
    # close() would leave it to the thread that accepts.
    connections[1]._listener.shutdown(socket.SHUT_RDWR)
    failed = at_once(Connections.connect, connections)
    assert failed[0] == failed[1] == failed[2]
    assert [(each.source, each.target) for each in failed[0]] == [(0, 1), (2, 1)]
    assert all("127.0.0.1" in each.address and each.reason for each in failed[0])


def test_ranks_gather_in_order_name_those_that_are_missing_and_know_the_first():
    assert at_once(lambda job: job.gather("x", job.rank**2), jobs(3)) == [[0, 1, 4]] * 3
    with pytest.raises(NotMeasured, match="ranks 0, 2 of 3"):
        jobs(3)[1].gather("facts", 1, seconds=0.1)
    ranks = jobs(3)
    assert [ranks[rank].is_first("report") for rank in (2, 0, 1)] == [True, False, False]
    assert ranks[1].is_first("another")


def test_a_process_without_torchrun_is_alone_and_has_facts_and_a_speed(monkeypatch):
    monkeypatch.setattr(measures, "_SECONDS", 0.005)
    job = join("gloo", 5.0)
    assert (job.rank, job.world_size, job.local_rank, job.node) == (0, 1, 0, 0)
    facts = own_facts(job, "127.0.0.1")
    assert Facts(**job.gather("facts", vars(facts))[0]) == facts
    assert (facts.interface, facts.local_world_size) == ("lo", 1)
    assert facts.kernels in ("Numba", "plain torch")
    assert min(facts.cores, facts.threads, facts.mtu) > 0
    assert (own_facts(job, "192.0.2.1").interface, own_facts(job, "192.0.2.1").mtu) == ("", 0)
    (speed,) = measure_speed(job, "speed")
    assert 0 < speed.busy <= 1
    assert min(speed.seconds) > 0


def test_a_store_that_cannot_be_reached_is_named(monkeypatch):
    where = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NotMeasured, match=r"rank 1 .*127\.0\.0\.1:"):
        join("gloo", 0.1)


def test_the_address_is_that_of_the_interface_that_the_backend_takes():
    addresses = [("gloo", "GLOO_SOCKET_IFNAME", "lo"), ("nccl", "MASTER_ADDR", "127.0.0.1")]
    addresses += [("nccl", "NCCL_SOCKET_IFNAME", each) for each in ("=lo", "l")]
    for backend, variable, value in addresses:
        assert address_of(backend, {variable: value}) == "127.0.0.1"
    assert interface_of("192.0.2.1") == ""
    for backend, value in (("gloo", "none7"), ("gloo", "l"), ("nccl", "=l")):
        variable = f"{backend.upper()}_SOCKET_IFNAME"
        with pytest.raises(SpecError, match=f"{variable}={value}"):
            address_of(backend, {variable: value})
