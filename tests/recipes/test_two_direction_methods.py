"""The methods that 2Direction is compared with: special cases, rates of the theory, traffic."""

import math

import pytest
import torch

from recipes.two_direction.methods import diana, ef21p_diana
from recipes.two_direction.methods.agd import AGD, FISTA, ConstantMomentumAGD
from recipes.two_direction.methods.diana import DIANA
from recipes.two_direction.methods.ef14 import EF14
from recipes.two_direction.methods.ef21 import EF21
from recipes.two_direction.methods.ef21p import EF21P
from recipes.two_direction.methods.ef21p_diana import EF21PDIANA
from tests.support.ranks import on_threads
from tests.two_direction.quadratics import quadratics
from torchcomp.compressors import Identity, RandK, TopK
from torchcomp.specs.errors import SpecError
from torchcomp.two_direction import Ranks, Simulated, TwoDirectionMethod

UP, DOWN = RandK(k=3, unbiased=True), TopK(k=3)
F = quadratics()
D = F.b.shape[1]
OMEGA, ALPHA = D / 3 - 1, 3 / D
L, MU = F.smoothness, F.mu


def gradients(server):
    """Worker by worker, so that ranks and simulation do the same arithmetic."""
    return lambda x: torch.stack([F.a[i] @ x - F.b[i] for i in server.mine])


BUILD = {
    "EF21-P + DIANA": lambda s, g, up=UP, down=DOWN: EF21PDIANA(
        gradients(s), F.x0, s, up, down, gamma=g
    ),
    "DIANA": lambda s, g, up=UP, down=None: DIANA(gradients(s), F.x0, s, up, gamma=g),
    "EF21": lambda s, g, up=DOWN, down=None: EF21(gradients(s), F.x0, s, up, gamma=g),
    "EF14": lambda s, g, up=DOWN, down=None: EF14(gradients(s), F.x0, s, up, gamma=g),
    "EF21-P": lambda s, g, up=None, down=DOWN: EF21P(gradients(s), F.x0, s, down, gamma=g),
    "AGD": lambda s, g: AGD(gradients(s), F.x0, s, lbar=L, mu=MU),
    "constant momentum": lambda s, g: ConstantMomentumAGD(
        gradients(s), F.x0, s, gamma=1 / L, mu=MU
    ),
    "FISTA": lambda s, g: FISTA(gradients(s), F.x0, s, gamma=1 / L),
}


def run(name, iterations, gamma=0.3, seed=0, **changes):
    method = BUILD[name](Simulated(F.n, seed), gamma, **changes)
    for _ in range(iterations):
        method.step()
    return method


@pytest.mark.parametrize("name", list(BUILD)[:5])
def test_with_identities_it_is_gradient_descent(name):
    x = F.x0
    for _ in range(50):
        x = x - F.gradients(x).mean(0) / L
    found = run(name, 50, 1 / L, up=Identity(), down=Identity())
    torch.testing.assert_close(found.solution, x)


def test_2direction_with_identities_is_agd():
    options = {"lbar": L, "mu": MU, "p": 1.0, "tau": 1.0}
    ours = TwoDirectionMethod(F.gradients, F.x0, Simulated(F.n), Identity(), Identity(), **options)
    agd = BUILD["AGD"](Simulated(F.n), 0)
    for _ in range(200):
        ours.step()
        agd.step()
        torch.testing.assert_close(ours.x, agd.x, rtol=0, atol=1e-10)


def test_agd_is_the_textbooks_three_sequences():
    """The sequences x, u and y, with theta as printed: L G th^2 + (L + G mu) th = L + G mu."""
    agd = AGD(F.gradients, F.x0, Simulated(F.n), lbar=L, mu=MU, gamma0=32.0)
    x, u, gamma = F.x0, F.x0, 32.0
    for _ in range(100):
        b = L + gamma * MU
        theta = (-b + math.sqrt(b * b + 4 * L * gamma * b)) / (2 * L * gamma)
        y = theta * u + (1 - theta) * x
        step = theta * gamma / (1 - theta)
        u = (b * u + MU * step * y - step * F.gradients(y).mean(0)) / (L + (gamma + step) * MU)
        x, gamma = theta * u + (1 - theta) * x, gamma + step
        agd.step()
        torch.testing.assert_close(agd.x, x, rtol=0, atol=1e-10)


def theories():
    """Name -> (step size, bound of the gap after t iterations)."""
    far = float(F.solution @ F.solution)
    start = F.gap(F.x0)
    theta = 1 - math.sqrt(1 - ALPHA)
    each = torch.linalg.eigvalsh(F.a)[:, -1].square().mean().sqrt().item()
    ef21 = min(1 / (L + each * math.sqrt((1 - ALPHA) / theta**2)), theta / (2 * MU))
    first = start + ef21 / theta * float(F.gradients(F.x0).square().sum(1).mean())
    both = ef21p_diana.step_size(L, F.lmax, MU, alpha=ALPHA, omega=OMEGA, n=F.n)
    return {
        "constant momentum": (0, lambda t: (start + MU / 2 * far) * (1 - math.sqrt(MU / L)) ** t),
        "FISTA": (0, lambda t: 2 * L * far / (t + 1) ** 2),
        # The theory's first step comes after the first message, because the g_i start at 0.
        "EF21": (ef21, lambda t: first * (1 - ef21 * MU) ** (t - 1)),
        "EF21-P + DIANA": (both, lambda t: (far / 2 / both + start) * (1 - both * MU / 2) ** t),
    }


@pytest.mark.parametrize("iterations", [10, 100])
@pytest.mark.parametrize("name", theories())
def test_it_is_as_fast_as_its_theory(name, iterations):
    gamma, bound = theories()[name]
    gaps = [F.gap(run(name, iterations, gamma, seed).solution) for seed in range(3)]
    assert sum(gaps) / 3 <= bound(iterations)


@pytest.mark.parametrize("iterations", [50, 200])
def test_diana_is_as_fast_as_its_theory(iterations):
    gamma, beta = diana.step_size(F.lmax, OMEGA, F.n), 1 / (OMEGA + 1)
    shift = (F.gradients(F.x0) - F.gradients(F.solution)).square().sum(1).mean()
    start = F.solution.square().sum() + 4 * OMEGA / (F.n * beta) * gamma**2 * shift
    runs = [run("DIANA", iterations, gamma, seed) for seed in range(5)]
    off = [(each.x - F.solution).square().sum() for each in runs]
    assert sum(off) / 5 <= start * (1 - min(gamma * F.mu, beta / 2)) ** iterations


def test_ef14_stays_off_the_minimum_of_different_workers_but_not_of_one():
    assert F.gap(run("EF14", 300, up=TopK(k=1)).solution) > 1e-6
    one = quadratics(n=1)
    alone = EF14(one.gradients, one.x0, Simulated(1), TopK(k=1), gamma=0.3)
    for _ in range(1500):
        alone.step()
    assert one.gap(alone.solution) < 1e-9


@pytest.mark.parametrize(
    ("name", "up", "down", "start"),
    [
        ("EF21-P + DIANA", 3, 3, D),
        ("DIANA", 3, D, D),
        ("EF21", 3, D, 0),
        ("EF14", 3, D, 0),
        ("EF21-P", D, 3, 0),
        ("AGD", D, D, 0),
    ],
)
def test_counts(name, up, down, start):
    traffic = run(name, 20).server.traffic
    assert (traffic.up_coordinates, traffic.down_coordinates) == (start + 20 * up, 20 * down)


def test_ranks_equal_the_simulation_bit_for_bit():
    def body():
        methods = [BUILD[name](Ranks(seed=5), 0.3) for name in BUILD]
        for method in methods:
            for _ in range(10):
                method.step()
        return torch.stack([method.solution for method in methods])

    expected = torch.stack([run(name, 10, seed=5).solution for name in BUILD])
    for found in on_threads(F.n, body):
        assert torch.equal(found, expected)


CALLS = [
    *((lambda name=name: run(name, 0, up=UP), "up") for name in ("EF21", "EF14")),
    (lambda: run("EF21-P", 0, down=UP), "down"),
    (lambda: run("EF21-P + DIANA", 0, down=UP), "down"),
    (lambda: run("DIANA", 0, up=DOWN), "up"),
    (lambda: run("DIANA", 0, gamma=-0.1), "gamma"),
    *(
        (lambda mu=mu: ConstantMomentumAGD(F.gradients, F.x0, Simulated(4), gamma=0.1, mu=mu), "mu")
        for mu in (0.0, 11.0)
    ),
    (lambda: ef21p_diana.step_size(2.0, 3.0, 2.5, alpha=0.1, omega=9.0, n=4), "mu"),
    (lambda: diana.step_size(2.0, -1.0, 4), "omega"),
]


@pytest.mark.parametrize(("call", "field"), CALLS)
def test_refusals(call, field):
    with pytest.raises(SpecError) as caught:
        call()
    assert caught.value.field == field
