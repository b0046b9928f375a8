"""One worker per rank: the same bits as in the simulation, and errors on every rank."""

import re
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist

from recipes.two_direction.methods.agd import AGD
from recipes.two_direction.methods.ef21 import EF21
from recipes.two_direction.methods.ef21p_diana import EF21PDIANA
from tests.support.cases import thorough
from tests.support.patience import PATIENCE
from tests.support.ranks import on_processes, on_threads
from tests.two_direction.quadratics import quadratics
from torchcomp import run_in_process, wire
from torchcomp.compressors import Quantize, RandK, TopK
from torchcomp.errors import NonFiniteError, RankMismatchError, WireError
from torchcomp.two_direction import Ranks, Simulated, TwoDirectionMethod

F = quadratics(n=4, d=40)
UP, DOWN = RandK(k=6, unbiased=True), TopK(k=5)
LEVELS = Quantize("int8", rounding="stochastic")


def gradients(server):
    """Compute worker by worker, so that ranks and simulation do the same arithmetic."""
    return lambda x: torch.stack([F.a[i] @ x - F.b[i] for i in server.mine])


METHODS = {
    "2Direction": lambda server: TwoDirectionMethod(
        gradients(server), F.x0, server, UP, DOWN, lbar=4.0, mu=F.mu
    ),
    "2Direction, quantised": lambda server: TwoDirectionMethod(
        gradients(server), F.x0, server, LEVELS, DOWN, lbar=4.0, mu=F.mu
    ),
    "EF21-P + DIANA": lambda server: EF21PDIANA(
        gradients(server), F.x0, server, UP, DOWN, gamma=0.3
    ),
    "EF21": lambda server: EF21(gradients(server), F.x0, server, DOWN, gamma=0.3),
    "AGD": lambda server: AGD(gradients(server), F.x0, server, lbar=2.0, mu=F.mu),
}


def tensors(method):
    """Return all tensors of a method by name. Rows are those of this process's workers."""
    return {name: value for name, value in vars(method).items() if isinstance(value, torch.Tensor)}


def assert_worker_of(simulated, rank, real):
    """Require this rank's tensors to equal the simulation's. Matrices have one row per worker."""
    for name, value in tensors(simulated).items():
        expected = value[rank : rank + 1] if value.dim() == 2 else value
        assert torch.equal(real[name], expected), (name, rank)


def real_runs(iterations):
    torch.set_num_threads(1)
    ends = {}
    for name, build in METHODS.items():
        server = Ranks(seed=5)
        method = build(server)
        for _ in range(iterations[name]):
            method.step()
        if name.startswith("2Direction"):
            method.finish_iteration()
        ends[name] = tensors(method), asdict(server.traffic), server.exchange.take_traffic(0)
    return ends


@pytest.mark.parametrize("long", [100, *thorough([1000])])
def test_ranks_equal_the_simulation_bit_for_bit(long):
    iterations = {name: long if name == "2Direction" else 25 for name in METHODS}
    ranks = on_processes(4, real_runs, iterations, timeout=PATIENCE)
    for name, build in METHODS.items():
        server = Simulated(4, seed=5)
        method = build(server)
        for _ in range(iterations[name]):
            method.step()
        if name.startswith("2Direction"):
            method.finish_iteration()
        for rank, ends in enumerate(ranks):
            real, traffic, exchanged = ends[name]
            assert traffic == asdict(server.traffic)
            # All-gather: every rank's frames go to the 3 others.
            assert exchanged.received == exchanged.sent == 3 * traffic["up_bytes"]
            assert_worker_of(method, rank, real)


def test_ranks_of_one_process_equal_the_simulation_bit_for_bit():
    def body(exchange):
        method = METHODS["2Direction"](Ranks(exchange, seed=5))
        for _ in range(20):
            method.step()
        return tensors(method)

    simulated = METHODS["2Direction"](Simulated(4, seed=5))
    for _ in range(20):
        simulated.step()
    for rank, mine in enumerate(run_in_process(4, body)):
        assert_worker_of(simulated, rank, mine)


def one_rank_diverges():
    server = Ranks()

    def broken(x):
        row = F.a[server.mine.start] @ x - F.b[server.mine.start]
        return (row / 0 if server.mine.start == 2 and method_started else row)[None]

    method_started = False
    method = TwoDirectionMethod(broken, F.x0, server, UP, DOWN, lbar=4.0, mu=F.mu)
    method.step()
    method_started = True
    before = {name: value.clone() for name, value in tensors(method).items()}
    with pytest.raises(NonFiniteError, match=r"worker 2 \(NaN"):
        method.step()
    assert all(torch.equal(value, before[name]) for name, value in tensors(method).items())
    method_started = False
    method.step()


def test_a_nan_on_one_rank_raises_on_every_rank_and_changes_nothing():
    on_threads(4, one_rank_diverges)


def test_the_simulation_also_names_the_worker():
    def broken(x):
        rows = F.gradients(x)
        rows[3, 7] = torch.nan
        return rows

    with pytest.raises(NonFiniteError, match="worker 3"):
        TwoDirectionMethod(broken, F.x0, Simulated(4), UP, DOWN, lbar=4.0, mu=F.mu)


def different_seeds():
    Ranks(seed=dist.get_rank())


def test_ranks_with_different_seeds_are_refused():
    for error in on_threads(2, different_seeds, catch=True):
        assert isinstance(error, RankMismatchError)
        assert re.search("seed.*0 on rank 0.*1 on rank 1", str(error))


def a_damaged_frame():
    server = Ranks()
    method = EF21PDIANA(gradients(server), F.x0, server, UP, DOWN, gamma=0.3)
    method.step()
    gather = server.exchange.all_gather_rows

    def damaging(message):
        if server.exchange.rank == 1:
            message[wire.HEADER - 1] ^= 1
        return gather(message)

    server.exchange.all_gather_rows = damaging
    with pytest.raises(WireError, match=r"\brank 1\b"):
        method.step()


def test_a_damaged_frame_raises_on_every_rank():
    on_threads(4, a_damaged_frame)
