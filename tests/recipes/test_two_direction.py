"""2Direction and the methods that it is compared with: twins, traffic, tuning, and the numbers."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from recipes.two_direction import contest
from recipes.two_direction import methods as m
from recipes.two_direction.data_sets import Samples, open_samples
from recipes.two_direction.quadratics import quadratic_setting, sweeps
from recipes.two_direction.softmax_regression import SoftmaxRegression, minimise
from recipes.two_direction.tuning import MethodRun, tune
from tests.recipes.runs import published, quick
from tests.support.cases import thorough
from tests.support.ranks import on_threads
from tests.two_direction.quadratics import quadratics
from torchcomp.compressors import Identity, RandK, TopK
from torchcomp.two_direction import Ranks, Simulated, TwoDirectionMethod

NAME = "two_direction"
UP, DOWN = RandK(k=3, unbiased=True), TopK(k=3)
F = quadratics()
D = F.b.shape[1]
L, MU = F.smoothness, F.mu


# The methods.


def gradients(server):
    """Worker by worker, so that ranks and simulation do the same arithmetic."""
    return lambda x: torch.stack([F.a[i] @ x - F.b[i] for i in server.mine])


BUILD = {
    "EF21-P + DIANA": lambda s, g, up=UP, down=DOWN: m.EF21PDIANA(
        gradients(s), F.x0, s, up, down, gamma=g
    ),
    "DIANA": lambda s, g, up=UP, down=None: m.DIANA(gradients(s), F.x0, s, up, gamma=g),
    "EF21": lambda s, g, up=DOWN, down=None: m.EF21(gradients(s), F.x0, s, up, gamma=g),
    "EF14": lambda s, g, up=DOWN, down=None: m.EF14(gradients(s), F.x0, s, up, gamma=g),
    "EF21-P": lambda s, g, up=None, down=DOWN: m.EF21P(gradients(s), F.x0, s, down, gamma=g),
    "AGD": lambda s, g: m.AGD(gradients(s), F.x0, s, lbar=1 / g, mu=MU),
    "momentum": lambda s, g, mu=MU: m.ConstantMomentumAGD(gradients(s), F.x0, s, gamma=g, mu=mu),
    "FISTA": lambda s, g: m.FISTA(gradients(s), F.x0, s, gamma=g),
}


def run(name, iterations, gamma=1 / L, seed=0, **changes):
    method = BUILD[name](Simulated(F.n, seed), gamma, **changes)
    for _ in range(iterations):
        method.step()
    return method


@pytest.mark.parametrize("name", list(BUILD)[:5])
def test_with_identities_it_is_gradient_descent(name):
    x = F.x0
    for _ in range(50):
        x = x - F.gradients(x).mean(0) / L
    found = run(name, 50, up=Identity(), down=Identity())
    torch.testing.assert_close(found.solution, x)


def test_agd_is_the_textbooks_and_2direction_with_identities():
    """The sequences x, u and y, with theta as printed: L G th^2 + (L + G mu) th = L + G mu."""
    agd = m.AGD(F.gradients, F.x0, Simulated(F.n), lbar=L, mu=MU, gamma0=32.0)
    x, u, gamma = F.x0, F.x0, 32.0
    options = {"lbar": L, "mu": MU, "p": 1.0, "tau": 1.0, "gamma0": 32.0}
    ours = TwoDirectionMethod(F.gradients, F.x0, Simulated(F.n), Identity(), Identity(), **options)
    for _ in range(100):
        b = L + gamma * MU
        theta = (-b + math.sqrt(b * b + 4 * L * gamma * b)) / (2 * L * gamma)
        y = theta * u + (1 - theta) * x
        step = theta * gamma / (1 - theta)
        u = (b * u + MU * step * y - step * F.gradients(y).mean(0)) / (L + (gamma + step) * MU)
        x, gamma = theta * u + (1 - theta) * x, gamma + step
        for method in (agd, ours):
            method.step()
            torch.testing.assert_close(method.x, x, rtol=0, atol=1e-10)


def test_agd_with_two_points_is_the_textbooks():
    momenta = {"FISTA": lambda t: t / (t + 3)}
    root = math.sqrt(MU / L)
    momenta["momentum"] = lambda t: (1 - root) / (1 + root)
    for name, momentum in momenta.items():
        x = y = F.x0
        for t in range(100):
            before, x = x, y - F.gradients(y).mean(0) / L
            y = x + momentum(t) * (x - before)
        torch.testing.assert_close(run(name, 100).solution, x)


def test_ef14_stays_off_the_minimum_of_different_workers_but_not_of_one():
    assert F.gap(run("EF14", 300, 0.3, up=TopK(k=1)).solution) > 1e-6
    one = quadratics(n=1)
    alone = m.EF14(one.gradients, one.x0, Simulated(1), TopK(k=1), gamma=0.3)
    for _ in range(1500):
        alone.step()
    assert one.gap(alone.solution) < 1e-9


def test_counts_and_ranks_equal_the_simulation_bit_for_bit():
    counts = {"EF21-P + DIANA": (3, 3, D), "DIANA": (3, D, D), "EF21": (3, D, 0)}
    counts |= {"EF14": (3, D, 0), "EF21-P": (D, 3, 0), "AGD": (D, D, 0)}
    for name, (up, down, start) in counts.items():
        traffic = run(name, 20).server.traffic
        assert (traffic.up_coordinates, traffic.down_coordinates) == (start + 20 * up, 20 * down)

    def body():
        methods = [BUILD[name](Ranks(seed=5), 1 / L) for name in BUILD]
        for method in methods:
            for _ in range(10):
                method.step()
        return torch.stack([method.solution for method in methods])

    expected = torch.stack([run(name, 10, seed=5).solution for name in BUILD])
    for found in on_threads(F.n, body):
        assert torch.equal(found, expected)


# The contest.


def samples(count=24, features=4, classes=3):
    rng = np.random.default_rng(0)
    matrix = np.hstack([rng.standard_normal((count, features)), np.ones((count, 1))])
    return Samples("made", matrix, rng.integers(0, classes, count), classes)


def test_gradients_are_autograds():
    mu, shards = 0.1, samples().shards(4, seed=0)
    f = SoftmaxRegression(shards, mu)
    x = torch.randn(15, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()

    def loss(shard):
        scores = torch.from_numpy(shard.features) @ x.view(5, 3)
        fit = torch.nn.functional.cross_entropy(scores, torch.from_numpy(shard.labels))
        return fit + mu / 2 * x.square().sum()

    losses = [loss(shard) for shard in shards]
    expected = torch.stack([torch.autograd.grad(each, x)[0] for each in losses])
    torch.testing.assert_close(f.gradients(range(4))(x.detach()), expected)
    torch.testing.assert_close(f.gradients(range(2, 3))(x.detach()), expected[2:3])
    assert f.value(x.detach()) == pytest.approx(torch.stack(losses).mean().item())


def test_the_infimum_without_a_regulariser():
    # One feature separates the classes, so f tends to 0 and has no minimum.
    labels = np.arange(24) % 2
    separable = replace(samples(classes=2), labels=labels, features=labels[:, None] * 2.0 - 1.0)
    assert minimise(SoftmaxRegression(separable.shards(4, seed=0), 0.0), 1e-8) == 0.0
    mixed = SoftmaxRegression(samples(200, features=2).shards(4, seed=0), 0.0)
    assert minimise(mixed, 1e-8) > 1


@pytest.mark.parametrize("name", ["AGD", "EF21-P + DIANA"])
def test_tuning_finds_what_trying_everything_finds(name):
    powers, costs, least = range(-3, 3), {}, 1e-6
    for i in powers:
        tried = MethodRun(BUILD[name](Simulated(F.n), 2.0**i), F.gap, least)
        tried.advance(20_000)
        if tried.reached:
            costs[i] = tried.cost
    build = lambda step: BUILD[name](Simulated(F.n), step)  # noqa: E731
    tuned = tune(build, F.gap, target=least, budget=20_000, powers=powers)
    assert (tuned.power, tuned.run.cost) == min(costs.items(), key=lambda item: item[1])


def test_a_reported_seed_chooses_no_step_and_a_method_that_fails_has_one_row():
    setting, tuned_on = contest.setting(samples(), 4, 0.3), []
    setting = replace(setting, gap=1e-2, budget=500, powers=range(-4, 3))

    def recorded(seed):
        tuned_on.append(seed)
        return setting.case(seed)

    best = contest.tuned(replace(setting, case=recorded), "EF21-P + DIANA", seeds=(0, 1))
    assert set(tuned_on) <= {1000, 1001}
    found = list(contest.measure(setting, "EF21-P + DIANA", (3, 0), []))
    assert [(seed, power) for power, seed, _ in found] == [(3, best.power), (0, best.power)]
    failed = list(contest.measure(replace(setting, gap=1e-12), "EF14", (0, 1), []))
    assert [(seed, done.reached) for _, seed, done in failed] == [(1000, False)]
    assert list(contest.measure(setting, "EF14", (0, 1), [{"seed": 1000, "power": 0}])) == []


@pytest.mark.parametrize("method", ["2Direction", "AGD", "EF21-P + DIANA"])
def test_the_coordinates_of_a_run_are_reproduced(method):
    row = published(NAME, "contest_digits_n10", method=method, mu=1e-2, seed=0)
    again = contest.run(contest.setting(open_samples(), 10, 1e-2), method, row["power"], 0)
    assert again.reached
    # Machines add in different orders, so a run can end some iterations sooner or later.
    assert again.cost == pytest.approx(row["up"] + row["down"], rel=0.02)


@pytest.mark.parametrize("method", ["2Direction", "AGD"])
def test_a_cell_of_the_map_and_a_point_of_the_scaling_are_reproduced(method):
    (largest,) = (point for point in sweeps()[0].points if point.kappa == 1000)
    found = {
        "winners": quadratic_setting(1e3, 64, m.Messages(6, 6), 40_000),
        "scaling": largest.setting,
    }
    for table, setting in found.items():
        place = dict(zip(contest.SHARED, setting.shared, strict=True))
        row = published(NAME, table, method=method, seed=0, **place)
        again = contest.run(setting, method, row["power"], 0)
        assert again.reached
        assert again.method.iterations == pytest.approx(row["iterations"], rel=0.02)


@pytest.mark.parametrize("part", ["contest", *thorough(["winners", "scaling"])])
def test_the_quick_run(part, tmp_path, monkeypatch):
    quick(NAME, tmp_path, monkeypatch, "--only", part)
    drawn = [path.name for path in tmp_path.glob("*.png")]
    assert drawn == ["contest_digits_n10.png"] * (part == "contest")
