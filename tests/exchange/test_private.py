"""PrivateExchange: connections of its own, beside the groups of the user."""

import gc
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.exchange.test_exchange import collectives
from tests.support.outcomes import caught
from tests.support.ranks import on_processes, with_fake_ranks
from torchcomp import ProcessGroupExchange, RankFailureError, RankMismatchError, run_in_process
from torchcomp.ddp.executors import ThreadExecutor, transport
from torchcomp.exchange import PrivateExchange, new_name
from torchcomp.exchange.failures import report_cause

CPU = torch.device("cpu")


def private(ranks=None):
    """An exchange among these ranks, by default all. All ranks of the job call this."""
    users = ProcessGroupExchange()
    name, ranks = new_name(users), users.global_ranks if ranks is None else ranks
    return PrivateExchange(name, ranks, users) if dist.get_rank() in ranks else None


def both():
    return collectives(ProcessGroupExchange()), collectives(private())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_and_counts_are_those_of_ranks_of_one_process(world_size):
    here = run_in_process(world_size, collectives)
    for (found, counts), others in zip(here, on_processes(world_size, both), strict=True):
        for results, counted in others:
            assert counted == counts
            assert results.keys() == found.keys()
            for name, tensors in results.items():
                # Two ranks have only one order of addition. Of three, gloo may have another one.
                exact = world_size < 3 or "all_reduce " not in name
                for mine, theirs in zip(found[name], tensors, strict=True):
                    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 0.02, "atol": 0.1}
                    torch.testing.assert_close(mine, theirs, **tolerance)


ORDER = [3, 0, 2]


def among_some():
    """Results on ranks of another order than their numbers, of which rank 1 is not a member."""
    # Groups of which only some ranks know, so that the ranks have made different calls.
    if dist.get_rank() < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    if dist.get_rank() == 3:
        dist.new_group([3], use_local_synchronization=True)
    exchange = private(ORDER)
    if exchange is None:
        return None
    rank = dist.get_rank()
    objects = [exchange.gather_objects({"rank": rank, "padding": "x" * 1000 * rank})]
    objects += [exchange.gather_objects(rank, dst=dst) for dst in range(3)]
    gathered = [int(part) for part in exchange.all_gather_rows(torch.tensor([rank]))]
    parts = exchange.reduce_scatter(torch.arange(3.0) + rank).tolist()
    error = caught(lambda: exchange.verify("a call", {"step": 5 if rank == 3 else 4}))
    return exchange.rank, exchange.global_ranks, objects, gathered, parts, error


def test_ranks_can_be_in_any_order_and_beside_groups_of_some_ranks():
    found = on_processes(4, among_some)
    assert found[1] is None
    for place, rank in enumerate(ORDER):
        mine, names, objects, gathered, parts, error = found[rank]
        assert (mine, names, gathered) == (place, tuple(ORDER), ORDER)
        assert [each["rank"] for each in objects[0]] == ORDER
        assert [len(each["padding"]) for each in objects[0]] == [3000, 0, 2000]
        assert objects[1:] == [ORDER if dst == place else [] for dst in range(3)]
        assert parts == [sum(ORDER) + 3 * place]
        assert type(error) is RankMismatchError
        assert "5 on rank 3" in str(error)
        assert "4 on ranks 0, 2" in str(error)


def resources():
    """Open descriptors and threads of this process."""
    gc.collect()
    own = Path("/proc/self")
    return len(list((own / "fd").iterdir())), len(list((own / "task").iterdir()))


def create_and_drop(times):
    def once():
        exchange = private()
        exchange.all_reduce(torch.ones(3))
        return exchange.gather_objects(dist.get_rank())

    once()
    before = resources()
    for _ in range(times):
        once()
    dist.barrier()
    return before, resources()


def test_dropped_exchanges_leave_no_descriptors_or_threads():
    for before, after in on_processes(2, create_and_drop, 100):
        assert after <= before


def connect_after_the_others():
    """Whether the last rank is connected when the exchange of this one is ready."""
    store, connect = distributed_c10d._get_default_store(), dist.ProcessGroupGloo

    def slowly(*arguments, **options):
        group = connect(*arguments, **options)
        time.sleep(0.5)
        store.set("connected", "")
        return group

    is_last = dist.get_rank() == dist.get_world_size() - 1
    with mock.patch.object(dist, "ProcessGroupGloo", slowly if is_last else connect):
        exchange = private()
    connected = store.check(["connected"])
    exchange.close()
    return connected


def test_an_exchange_is_ready_and_can_be_closed_when_all_ranks_are_connected():
    assert on_processes(3, connect_after_the_others) == [True] * 3


def private_exchange(group):
    return transport(group, CPU)


def users_exchange_after_a_failure(group):
    # The groups of the failure and of later exchanges have the same ranks.
    # Reported by the rank that is stopped later: it will not report again.
    if dist.get_rank() == dist.get_world_size() - 1:
        report_cause(ProcessGroupExchange(), MemoryError())
    dist.barrier()
    return ProcessGroupExchange(group), ThreadExecutor()


def beside_a_stopped_rank(seconds, transport_of):
    """The exceptions of collectives while the last rank is stopped."""
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    exchange, executor = transport_of(group)
    exchange.all_reduce(torch.ones(2))
    pids = exchange.gather_objects(os.getpid())
    exchange.all_reduce(torch.ones(2))
    last, store = dist.get_world_size() - 1, distributed_c10d._get_default_store()
    found = []
    if dist.get_rank() == last:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        executor.submit(lambda: found.append(caught(lambda: exchange.all_reduce(torch.ones(2)))))
        executor.join()
        assert exchange.backend == "gloo"
        store.set(f"raised on {dist.get_rank()}", "")
        # Only when all others have raised: the connections of a process that continues end.
        if dist.get_rank() == 0:
            store.wait([f"raised on {rank}" for rank in range(last)])
            os.kill(pids[last], signal.SIGCONT)
    executor.close()
    return exchange.timeout, found


@pytest.mark.parametrize("transport_of", [private_exchange, users_exchange_after_a_failure])
def test_a_stopped_rank_ends_the_others_within_the_timeout_of_the_users_group(transport_of):
    outcomes = on_processes(3, beside_a_stopped_rank, 4, transport_of, timeout=60)
    for timeout, _ in outcomes:
        assert timeout == timedelta(seconds=4)
    assert [[type(error) for error in found] for _, found in outcomes] == [
        [RankFailureError],
        [RankFailureError],
        [],
    ]
    # A cause that a rank has reported in another group is not that of this failure.
    assert not any("MemoryError" in str(error) for _, found in outcomes for error in found)


def behind_a_silent_store():
    name, users = new_name(ProcessGroupExchange()), dist.new_group(timeout=timedelta(seconds=0.5))
    beside, silent = ProcessGroupExchange(users), threading.Event()
    with mock.patch.object(dist, "ProcessGroupGloo", side_effect=lambda *_, **__: silent.wait()):
        error = caught(lambda: PrivateExchange(name, beside.global_ranks, beside))
    return type(error), type(error.__cause__)


def test_a_store_that_does_not_answer_ends_the_wait_for_a_connection():
    found = on_processes(2, behind_a_silent_store)
    assert found == 2 * [(RankFailureError, dist.DistStoreError)]


def without_the_last_rank():
    """The exceptions of connecting when the last rank never does."""
    users = ProcessGroupExchange(dist.new_group(timeout=timedelta(seconds=1)))
    name, last = new_name(users), dist.get_world_size() - 1
    if dist.get_rank() == last:
        return []
    return [caught(lambda: PrivateExchange(name, users.global_ranks, users))]


def test_a_rank_that_never_connects_ends_the_others_within_the_timeout_of_the_users_group():
    # The store of this job is a file.
    outcomes = on_processes(3, without_the_last_rank)
    types = [[type(error) for error in found] for found in outcomes]
    assert types == [[RankFailureError], [RankFailureError], []]
    assert all("rank 2" in str(error) for found in outcomes for error in found)


def refuse(*arguments, **options):
    raise dist.DistBackendError("NCCL error: ncclInvalidArgument: a bad value")


def refused():
    with mock.patch.object(dist, "all_reduce", refuse):
        return caught(lambda: ProcessGroupExchange().all_reduce(torch.ones(1)))


def test_an_argument_that_nccl_refuses_is_no_lost_rank():
    assert type(with_fake_ranks(2, refused)) is dist.DistBackendError
