"""One worker per rank: the same bits as in the simulation, and errors on every rank."""

from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist

from tests.support.outcomes import assert_refused
from tests.support.patience import PATIENCE
from tests.support.ranks import on_processes
from tests.two_direction.quadratics import quadratics
from torchcomp import run_in_process
from torchcomp.compressors import Quantize, RandK, TopK
from torchcomp.routes import wire
from torchcomp.specs.errors import NonFiniteError, RankMismatchError, WireError
from torchcomp.two_direction import Ranks, Simulated, TwoDirectionMethod

F = quadratics(n=4, d=40)
COMPRESSORS = {
    "randk": RandK(k=6, unbiased=True),
    "quantised": Quantize("int8", rounding="stochastic"),
}


def built(server, up="randk", broken=lambda worker: 1.0):
    """Compute worker by worker, so that ranks and simulation do the same arithmetic."""

    def gradients(x):
        return torch.stack([broken(i) * (F.a[i] @ x - F.b[i]) for i in server.mine])

    options = {"lbar": 4.0, "mu": F.mu}
    return TwoDirectionMethod(gradients, F.x0, server, COMPRESSORS[up], TopK(k=5), **options)


def tensors(method):
    """Return all tensors of a method by name. Rows are those of this process's workers."""
    return {name: value for name, value in vars(method).items() if isinstance(value, torch.Tensor)}


def run(server, up, iterations):
    method = built(server, up)
    for _ in range(iterations):
        method.step()
    method.finish_iteration()
    return tensors(method), asdict(server.traffic)


def on_a_rank(up, iterations):
    torch.set_num_threads(1)
    server = Ranks(seed=5)
    return *run(server, up, iterations), server.exchange.take_traffic(0)


def assert_worker_of(simulated, rank, real):
    """Require this rank's tensors to equal the simulation's. Matrices have one row per worker."""
    for name, value in simulated.items():
        expected = value[rank : rank + 1] if value.dim() == 2 else value
        assert torch.equal(real[name], expected), (name, rank)


@pytest.mark.parametrize(("up", "iterations"), [("randk", 100), ("quantised", 25)])
def test_ranks_equal_the_simulation_bit_for_bit(up, iterations):
    simulated, expected = run(Simulated(4, seed=5), up, iterations)
    ranks = on_processes(4, on_a_rank, up, iterations, timeout=PATIENCE)
    for rank, (real, traffic, exchanged) in enumerate(ranks):
        assert traffic == expected
        # All-gather: every rank's frames go to the 3 others.
        assert exchanged.received == exchanged.sent == 3 * traffic["up_bytes"]
        assert_worker_of(simulated, rank, real)


def test_ranks_of_one_process_equal_the_simulation_bit_for_bit():
    simulated, _ = run(Simulated(4, seed=5), "randk", 20)
    found = run_in_process(4, lambda exchange: run(Ranks(exchange, seed=5), "randk", 20)[0])
    for rank, mine in enumerate(found):
        assert_worker_of(simulated, rank, mine)


@pytest.mark.parametrize("simulated", [False, True])
def test_a_nan_of_one_worker_raises_on_every_rank_and_changes_nothing(simulated):
    def body():
        wrong = set()
        method = built(
            Simulated(4) if simulated else Ranks(),
            broken=lambda worker: torch.nan if worker in wrong else 1.0,
        )
        method.step()
        before = {name: value.clone() for name, value in tensors(method).items()}
        wrong.add(2)
        try:
            method.step()
        finally:
            assert all(torch.equal(value, before[name]) for name, value in tensors(method).items())
            wrong.clear()
            method.step()

    assert_refused(1 if simulated else 4, body, NonFiniteError, "worker 2 (NaN")


def a_damaged_frame():
    server = Ranks()
    method = built(server)
    method.step()
    gather = server.exchange.all_gather_rows

    def damaging(message):
        if server.exchange.rank == 1:
            message[wire.HEADER - 1] ^= 1
        return gather(message)

    server.exchange.all_gather_rows = damaging
    method.step()


def test_a_damaged_frame_and_different_seeds_raise_on_every_rank():
    assert_refused(4, a_damaged_frame, WireError, "rank 1")
    words = "seed", "0 on rank 0", "1 on rank 1"
    assert_refused(2, lambda: Ranks(seed=dist.get_rank()), RankMismatchError, *words)
