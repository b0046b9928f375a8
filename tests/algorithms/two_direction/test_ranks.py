"""One worker a rank: the same bits as the simulation, the same bytes as the wire, one error."""

import pytest
import torch
import torch.distributed as dist

from tests.algorithms.two_direction.quadratics import quadratics
from tests.support.patience import PATIENCE
from tests.support.ranks import on_processes, on_threads
from torchcomp import wire
from torchcomp.algorithms import AGD, EF21, EF21PDIANA, Ranks, Simulated, TwoDirectionMethod
from torchcomp.compressors import Quantize, RandK, TopK
from torchcomp.errors import NonFiniteError, RankMismatchError, WireError

F = quadratics(n=4, d=40)
UP, DOWN = RandK(k=6, unbiased=True), TopK(k=5)
LEVELS = Quantize("int8", rounding="stochastic")


def gradients(star):
    """Worker by worker, so that both forms do the same arithmetic."""
    return lambda x: torch.stack([F.a[i] @ x - F.b[i] for i in star.mine])


METHODS = {
    "2Direction": lambda star: TwoDirectionMethod(
        gradients(star), F.x0, star, UP, DOWN, lbar=4.0, mu=F.mu
    ),
    "2Direction, quantised": lambda star: TwoDirectionMethod(
        gradients(star), F.x0, star, LEVELS, DOWN, lbar=4.0, mu=F.mu
    ),
    "EF21-P + DIANA": lambda star: EF21PDIANA(gradients(star), F.x0, star, UP, DOWN, gamma=0.3),
    "EF21": lambda star: EF21(gradients(star), F.x0, star, DOWN, gamma=0.3),
    "AGD": lambda star: AGD(gradients(star), F.x0, star, lbar=2.0, mu=F.mu),
}


def held(method):
    """Everything that a method holds, as name -> tensor; of its workers, the own ones alone."""
    values = {**vars(method), **vars(getattr(method, "server", method))}
    values |= {f"worker's {k}": v for k, v in vars(getattr(method, "workers", method)).items()}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def real_runs(iterations):
    torch.set_num_threads(1)
    ends = {}
    for name, build in METHODS.items():
        star = Ranks(seed=5)
        method = build(star)
        for _ in range(iterations[name]):
            method.step()
        if name.startswith("2Direction"):
            method.settle()
        ends[name] = held(method), star.state_dict(), star.exchange.take_traffic(0)
    return ends


def test_ranks_equal_the_simulation_bit_for_bit():
    iterations = {name: 1000 if name == "2Direction" else 25 for name in METHODS}
    ranks = on_processes(4, real_runs, iterations, timeout=PATIENCE)
    for name, build in METHODS.items():
        star = Simulated(4, seed=5)
        method = build(star)
        for _ in range(iterations[name]):
            method.step()
        if name.startswith("2Direction"):
            method.settle()
        for rank, ends in enumerate(ranks):
            real, traffic, link = ends[name]
            assert traffic == star.state_dict()
            assert link.received == link.sent == 3 * traffic["up_bytes"]
            for part, value in held(method).items():
                mine = value[rank : rank + 1] if value.dim() == 2 else value
                assert torch.equal(real[part], mine), (name, part, rank)


def one_rank_diverges():
    star = Ranks()

    def broken(x):
        row = F.a[star.mine.start] @ x - F.b[star.mine.start]
        return (row / 0 if star.mine.start == 2 and method_started else row)[None]

    method_started = False
    method = TwoDirectionMethod(broken, F.x0, star, UP, DOWN, lbar=4.0, mu=F.mu)
    method.step()
    method_started = True
    before = {name: value.clone() for name, value in held(method).items()}
    with pytest.raises(
        NonFiniteError, match=r"gradient of worker 2 .NaN or infinity. cannot be used"
    ):
        method.step()
    assert all(torch.equal(value, before[name]) for name, value in held(method).items())
    method_started = False
    method.step()


def test_one_ranks_nan_stops_all_ranks_with_its_name_and_changes_nothing():
    on_threads(4, one_rank_diverges)


def test_the_simulation_names_the_worker_too():
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
        assert "seed: 0 on rank 0, 1 on rank 1" in str(error)


def a_damaged_frame():
    star = Ranks()
    method = EF21PDIANA(gradients(star), F.x0, star, UP, DOWN, gamma=0.3)
    method.step()
    gather = star.exchange.gather

    def damaging(message):
        if star.exchange.rank == 1:
            message[wire.HEADER] ^= 1
        return gather(message)

    star.exchange.gather = damaging
    with pytest.raises(WireError, match="rank 1's was damaged on the way"):
        method.step()


def test_a_damaged_frame_stops_all_ranks():
    on_threads(4, a_damaged_frame)
