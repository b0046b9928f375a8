"""The methods: special cases, convergence rates of the theory, and traffic."""

import math

import pytest
import torch

from recipes.two_direction.methods.agd import AGD, FISTA, ConstantMomentumAGD
from recipes.two_direction.methods.diana import DIANA
from recipes.two_direction.methods.diana import step_size as diana_step
from recipes.two_direction.methods.ef14 import EF14
from recipes.two_direction.methods.ef21 import EF21
from recipes.two_direction.methods.ef21p import EF21P
from recipes.two_direction.methods.ef21p_diana import EF21PDIANA
from recipes.two_direction.methods.ef21p_diana import step_size as ef21p_diana_step
from tests.support.cases import some, thorough
from tests.two_direction.quadratics import quadratics
from torchcomp import wire
from torchcomp.compressors import Identity, RandK, TopK
from torchcomp.two_direction import Simulated, TwoDirectionMethod
from torchcomp.two_direction import theory as parameters

UP, DOWN = RandK(k=3, unbiased=True), TopK(k=3)
F = quadratics()
D = F.b.shape[1]
OMEGA = ALPHA_INVERSE = D / 3
OMEGA -= 1
ALPHA = 1 / ALPHA_INVERSE


def two_direction(f=F, up=UP, down=DOWN, seed=0, **options):
    options = {"lbar": 4 * f.smoothness, "mu": f.mu, **options}
    return TwoDirectionMethod(f.gradients, f.x0, Simulated(f.n, seed), up, down, **options)


def run(method, iterations):
    for _ in range(iterations):
        method.step()
    return method


def gradient_descent(f, gamma, iterations):
    x = f.x0
    for _ in range(iterations):
        x = x - gamma * f.gradients(x).mean(0)
    return x


# --- Special cases --------------------------------------------------------------------------------


@pytest.mark.parametrize("mu", [F.mu, 0.0])
def test_2direction_with_identities_is_agd(mu):
    lbar = F.smoothness
    ours = two_direction(up=Identity(), down=Identity(), lbar=lbar, mu=mu, p=1.0, tau=1.0)
    agd = AGD(F.gradients, F.x0, Simulated(F.n), lbar=lbar, mu=mu)
    for _ in range(200):
        ours.step()
        agd.step()
        torch.testing.assert_close(ours.x, agd.x, rtol=0, atol=1e-10)
        torch.testing.assert_close(ours.u, agd.u, rtol=0, atol=1e-10)


def test_agd_is_the_textbooks_three_sequences():
    """The sequences x, u and y, with theta as printed: L G th^2 + (L + G mu) th = L + G mu."""
    L, mu = F.smoothness, F.mu
    agd = AGD(F.gradients, F.x0, Simulated(F.n), lbar=L, mu=mu, gamma0=32.0)
    x = u = F.x0
    gamma = 32.0
    for _ in range(100):
        b = L + gamma * mu
        theta = (-b + math.sqrt(b * b + 4 * L * gamma * b)) / (2 * L * gamma)
        y = theta * u + (1 - theta) * x
        step = theta * gamma / (1 - theta)
        g = F.gradients(y).mean(0)
        u = (b * u + mu * step * y - step * g) / (L + (gamma + step) * mu)
        x, gamma = theta * u + (1 - theta) * x, gamma + step
        agd.step()
        torch.testing.assert_close(agd.x, x, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "build",
    [
        lambda server, g: EF21PDIANA(F.gradients, F.x0, server, Identity(), Identity(), gamma=g),
        lambda server, g: DIANA(F.gradients, F.x0, server, Identity(), gamma=g),
        lambda server, g: EF21(F.gradients, F.x0, server, Identity(), gamma=g),
        lambda server, g: EF14(F.gradients, F.x0, server, Identity(), gamma=g),
        lambda server, g: EF21P(F.gradients, F.x0, server, Identity(), gamma=g),
    ],
    ids=["EF21-P + DIANA", "DIANA", "EF21", "EF14", "EF21-P"],
)
def test_with_identities_it_is_gradient_descent(build):
    gamma = 1 / F.smoothness
    method = run(build(Simulated(F.n), gamma), 50)
    torch.testing.assert_close(method.solution, gradient_descent(F, gamma, 50))


def test_diana_of_one_worker_without_variance_is_gradient_descent():
    one = quadratics(n=1)
    gamma = diana_step(one.lmax, 0.0, 1)
    up = RandK(1.0, unbiased=True)
    method = run(DIANA(one.gradients, one.x0, Simulated(1), up, gamma=gamma), 50)
    torch.testing.assert_close(method.solution, gradient_descent(one, gamma, 50))


# --- Convergence rates on quadratics with known L and mu ------------------------------------------


@pytest.mark.parametrize("iterations", [10, 50, 150])
def test_agd_is_as_fast_as_its_theory(iterations):
    L, mu = F.smoothness, F.mu
    agd = run(AGD(F.gradients, F.x0, Simulated(F.n), lbar=L, mu=mu), iterations)
    energy = F.gap(F.x0) + (L + mu) / 2 * float(F.solution @ F.solution)
    assert F.gap(agd.x) <= energy * agd.rho


@pytest.mark.parametrize("iterations", [10, 50, 100])
def test_nesterovs_method_is_as_fast_as_its_theory(iterations):
    L, mu = F.smoothness, F.mu
    server = Simulated(F.n)
    agd = run(ConstantMomentumAGD(F.gradients, F.x0, server, gamma=1 / L, mu=mu), iterations)
    energy = F.gap(F.x0) + mu / 2 * float(F.solution @ F.solution)
    assert F.gap(agd.x) <= energy * (1 - math.sqrt(mu / L)) ** iterations


@pytest.mark.parametrize("iterations", [1, 10, 50, 150])
def test_fista_is_as_fast_as_its_theory(iterations):
    L = F.smoothness
    fista = run(FISTA(F.gradients, F.x0, Simulated(F.n), gamma=1 / L), iterations)
    assert F.gap(fista.x) <= 2 * L * float(F.solution @ F.solution) / (iterations + 1) ** 2


def test_fista_extrapolates_by_t_over_t_plus_3():
    gamma = 0.5 / F.smoothness
    fista = FISTA(F.gradients, F.x0, Simulated(F.n), gamma=gamma)
    x = before = F.x0
    for t in range(20):
        y = x + (t - 1) / (t + 2) * (x - before) if t else x
        before, x = x, y - gamma * F.gradients(y).mean(0)
        fista.step()
        torch.testing.assert_close(fista.x, x)


def mean_gap(build, iterations, seeds=10):
    return sum(F.gap(run(build(seed), iterations).solution) for seed in range(seeds)) / seeds


@pytest.mark.parametrize("iterations", [50, *thorough([200, 500])])
def test_2direction_is_as_fast_as_its_theory(iterations):
    chosen = parameters.probabilities(OMEGA)
    both = {"p": chosen.p, "tau": chosen.tau}
    # The bound of the proof's potential. It is true even with a constant of 1 instead of 660508.
    lbar = parameters.lbar(
        F.smoothness, F.lmax, n=F.n, alpha=ALPHA, omega=OMEGA, **both, constant=1.0
    )
    method = run(two_direction(lbar=lbar, **both), iterations)
    energy = F.gap(F.x0) + (lbar + F.mu) / 2 * float(F.solution @ F.solution)
    gap = mean_gap(lambda seed: two_direction(lbar=lbar, seed=seed, **both), iterations, 3)
    assert gap <= energy * method.rho
    # Gamma grows at least as fast as in the theory: by a factor of 1 + 1/Q per iteration.
    pace = min(method.constants.theta_min, math.sqrt(F.mu / (4 * chosen.p * lbar)))
    assert method.gamma >= math.exp(chosen.p * pace * iterations / 2)


@pytest.mark.parametrize("iterations", [50, 200])
def test_diana_is_as_fast_as_its_theory(iterations):
    gamma = diana_step(F.lmax, OMEGA, F.n)

    def build(seed):
        return DIANA(F.gradients, F.x0, Simulated(F.n, seed), UP, gamma=gamma)

    shift = (F.gradients(F.x0) - F.gradients(F.solution)).square().sum(1).mean()
    beta = 1 / (OMEGA + 1)
    start = F.solution.square().sum() + 4 * OMEGA / (F.n * beta) * gamma**2 * shift
    off = [(run(build(s), iterations).x - F.solution).square().sum() for s in range(5)]
    assert sum(off) / 5 <= start * (1 - min(gamma * F.mu, beta / 2)) ** iterations


@pytest.mark.parametrize("iterations", [50, 200])
def test_ef21p_diana_is_as_fast_as_its_theory(iterations):
    gamma = ef21p_diana_step(F.smoothness, F.lmax, F.mu, alpha=ALPHA, omega=OMEGA, n=F.n)

    def build(seed):
        return EF21PDIANA(F.gradients, F.x0, Simulated(F.n, seed), UP, DOWN, gamma=gamma)

    start = float(F.solution @ F.solution) / (2 * gamma) + F.gap(F.x0)
    assert mean_gap(build, iterations, 3) <= start * (1 - gamma * F.mu / 2) ** iterations


@pytest.mark.parametrize("iterations", [50, 200, 500])
def test_ef21_is_as_fast_as_its_theory(iterations):
    theta = 1 - math.sqrt(1 - ALPHA)
    each = torch.linalg.eigvalsh(F.a)[:, -1].square().mean().sqrt().item()
    gamma = min(1 / (F.smoothness + each * math.sqrt((1 - ALPHA) / theta**2)), theta / (2 * F.mu))
    method = run(EF21(F.gradients, F.x0, Simulated(F.n), DOWN, gamma=gamma), iterations)
    # The theory's first step comes after the first message, because the g_i start at 0.
    start = F.gap(F.x0) + gamma / theta * float(F.gradients(F.x0).square().sum(1).mean())
    assert F.gap(method.x) <= start * (1 - gamma * F.mu) ** (iterations - 1)


# --- Convergence ----------------------------------------------------------------------------------


CONVERGING = {
    "2Direction": lambda seed: two_direction(seed=seed),
    "EF21-P + DIANA": lambda s: EF21PDIANA(
        F.gradients, F.x0, Simulated(F.n, s), UP, DOWN, gamma=0.3
    ),
    "DIANA": lambda s: DIANA(F.gradients, F.x0, Simulated(F.n, s), UP, gamma=0.5),
    "EF21": lambda s: EF21(F.gradients, F.x0, Simulated(F.n, s), DOWN, gamma=0.3),
    "EF21-P": lambda s: EF21P(F.gradients, F.x0, Simulated(F.n, s), DOWN, gamma=0.3),
    "AGD": lambda s: AGD(F.gradients, F.x0, Simulated(F.n), lbar=F.smoothness, mu=F.mu),
    "AGD, mu = 0": lambda s: AGD(F.gradients, F.x0, Simulated(F.n), lbar=F.smoothness, mu=0.0),
}


@pytest.mark.parametrize("name", some(CONVERGING, of=3))
def test_converges_to_1e_10(name):
    accelerated = name == "2Direction" or name.startswith("AGD")
    assert F.gap(run(CONVERGING[name](1), 600 if accelerated else 2000).solution) < 1e-10


def test_ef14_stays_off_the_minimum_of_different_workers_but_not_of_one():
    stuck = EF14(F.gradients, F.x0, Simulated(F.n), TopK(k=1), gamma=0.3)
    assert F.gap(run(stuck, 1000).solution) > 1e-6
    one = quadratics(n=1)
    alone = EF14(one.gradients, one.x0, Simulated(1), TopK(k=1), gamma=0.3)
    assert one.gap(run(alone, 2000).solution) < 1e-10


def test_float32_reaches_a_relative_gap_of_1e_10_and_stays_there():
    method = TwoDirectionMethod(
        lambda x: F.a.float() @ x - F.b.float(),
        F.x0.float(),
        Simulated(F.n),
        UP,
        DOWN,
        lbar=4 * F.smoothness,
        mu=F.mu,
    )
    run(method, 600)
    assert method.solution.dtype == torch.float32
    assert F.gap(method.solution.double()) < 1e-10 * F.gap(F.x0)


# --- Counts ---------------------------------------------------------------------------------------


def heads(seed, p, iterations):
    """Run the method. Return how often the coin showed heads, by counting dense messages."""
    method = run(two_direction(seed=seed, p=p), iterations)
    down = method.server.traffic.down_coordinates - D - DOWN.kept(D) * iterations
    assert down % (2 * D) == 0
    return down // (2 * D), method


def test_2direction_counts():
    tossed, method = heads(seed=3, p=0.25, iterations=400)
    traffic = method.server.traffic
    assert abs(tossed / 400 - 0.25) < 0.1
    # The last iteration's second uplink message is not sent yet: the next iteration would send it.
    assert traffic.up_coordinates == D + 2 * 3 * 400 - 3
    assert traffic.round_trips == 401
    method.finish_iteration()
    method.finish_iteration()  # the second call does nothing
    assert traffic.up_coordinates == D + 2 * 3 * 400
    # Gradients at z are computed once after z has moved, and then cached.
    assert method.evaluations == 1 + 400 + tossed
    both = wire.framed(2 * 3 * 8)
    dense = wire.framed(D * 8)
    single = wire.framed(3 * 8)
    assert traffic.up_bytes == dense + 399 * both + 2 * single
    kept = wire.framed(wire.nbytes(DOWN.layout(D, torch.float64)))
    assert traffic.down_bytes == 400 * kept + (1 + 2 * tossed) * dense


@pytest.mark.parametrize(
    ("name", "up", "down", "start"),
    [
        ("EF21-P + DIANA", 3, 3, D),
        ("DIANA", 3, D, D),
        ("EF21", 3, D, 0),
        ("EF21-P", D, 3, 0),
        ("AGD", D, D, 0),
    ],
)
def test_counts_of_the_others(name, up, down, start):
    traffic = run(CONVERGING[name](0), 20).server.traffic
    assert (traffic.up_coordinates, traffic.down_coordinates) == (start + 20 * up, 20 * down)


def test_settle_changes_only_when_a_message_is_sent():
    plain, settled = two_direction(), two_direction()
    for _ in range(50):
        plain.step()
        settled.step()
        settled.finish_iteration()
    plain.finish_iteration()
    for name in "uwzxkvh":
        assert torch.equal(getattr(plain, name), getattr(settled, name)), name


# --- Long runs ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("dtype", "reached"), [(torch.float64, 1e-25), (torch.float32, 1e-10)])
def test_200_000_iterations(dtype, reached):
    f = quadratics(n=2)
    a, b = f.a.to(dtype), f.b.to(dtype)
    options = {"lbar": 4 * f.smoothness, "mu": f.mu}
    method = TwoDirectionMethod(
        lambda x: a @ x - b, f.x0.to(dtype), Simulated(f.n), UP, DOWN, **options
    )
    run(method, 200_000)
    fallen = f.gap(method.solution.double()) / f.gap(f.x0)
    print(f"{dtype}: f - f* fell to {fallen:.1e} of its start")
    assert method.gamma == math.inf
    assert fallen < reached
