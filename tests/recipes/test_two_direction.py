"""2Direction and the methods that it is compared with: twins, traffic, tuning, and the numbers."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from recipes.two_direction import contest
from recipes.two_direction.data_sets import Samples, open_samples
from recipes.two_direction.methods import METHODS, Messages
from recipes.two_direction.methods.agd import AGD
from recipes.two_direction.quadratics import D, Quadratics, quadratic_setting, sweeps
from recipes.two_direction.softmax_regression import SoftmaxRegression, minimise
from recipes.two_direction.tuning import MethodRun, tune
from tests.recipes.runs import published
from tests.support.ranks import on_threads
from torchcomp.compressors import Identity
from torchcomp.two_direction import Ranks, Simulated, TwoDirectionMethod

NAME = "two_direction"
F, EASY = (Quadratics(kappa=kappa, n=4, seed=0) for kappa in (100.0, 10.0))  # L = 1
SENT, DENSE = Messages(3, 3), Messages(D, D)  # TopK and RandK of all entries change nothing


def run(name, iterations, sent=SENT, step=1.0, f=F, seed=0):
    method = METHODS[name](f, Simulated(f.n, seed), sent, step)
    for _ in range(iterations):
        method.step()
    return method


def gradient(x):
    return F.gradients(range(F.n))(x).mean(0)


@pytest.mark.parametrize("name", ["EF21-P + DIANA", "DIANA", "EF21", "EF14", "EF21-P"])
def test_with_dense_messages_it_is_gradient_descent(name):
    x = torch.zeros(D, dtype=torch.float64)
    for _ in range(50):
        x = x - gradient(x)
    torch.testing.assert_close(run(name, 50, DENSE).x, x)


def test_agd_is_the_textbooks_and_2direction_with_dense_messages():
    """The sequences x, u and y, with theta as printed: L G th^2 + (L + G mu) th = L + G mu."""
    x = u = torch.zeros(D, dtype=torch.float64)
    gamma = 32.0
    start, options = (F.gradients(range(F.n)), x), {"lbar": 1.0, "mu": F.mu, "gamma0": gamma}
    agd = AGD(*start, Simulated(F.n), **options)
    ours = TwoDirectionMethod(*start, Simulated(F.n), Identity(), Identity(), **options)
    for _ in range(100):
        b = 1 + gamma * F.mu
        theta = (-b + math.sqrt(b * b + 4 * gamma * b)) / (2 * gamma)
        y = theta * u + (1 - theta) * x
        step = theta * gamma / (1 - theta)
        u = (b * u + F.mu * step * y - step * gradient(y)) / (1 + (gamma + step) * F.mu)
        x, gamma = theta * u + (1 - theta) * x, gamma + step
        for method in (agd, ours):
            method.step()
            torch.testing.assert_close(method.x, x, rtol=0, atol=1e-10)


@pytest.mark.parametrize("mu", [F.mu, 0.0])
def test_agd_with_two_points_is_the_textbooks(mu):
    f = copy.copy(F)
    f.mu = mu
    x = y = torch.zeros(D, dtype=torch.float64)
    for t in range(100):
        before, x = x, y - gradient(y)
        momentum = (1 - math.sqrt(mu)) / (1 + math.sqrt(mu)) if mu else t / (t + 3)
        y = x + momentum * (x - before)
    torch.testing.assert_close(run("AGD", 100, f=f).x, x)


def test_ef14_stays_off_the_minimum_of_different_workers_but_not_of_one():
    problems = EASY, Quadratics(kappa=10.0, n=1, seed=0)
    values = [f.value(run("EF14", 600, Messages(15, D), 0.3, f).x) for f in problems]
    assert values[0] > 1e-4 > 1e-12 > values[1]


def test_counts_and_ranks_equal_the_simulation_bit_for_bit():
    counts = {"EF21-P + DIANA": (3, 3, D), "DIANA": (3, D, D), "EF21": (3, D, 0)}
    counts |= {"EF14": (3, D, 0), "EF21-P": (D, 3, 0), "AGD": (D, D, 0)}
    for name, (up, down, start) in counts.items():
        traffic = run(name, 20).server.traffic
        assert (traffic.up_coordinates, traffic.down_coordinates) == (start + 20 * up, 20 * down)

    def body():
        methods = [build(F, Ranks(seed=5), SENT, 0.25) for build in METHODS.values()]
        for method in methods:
            for _ in range(10):
                method.step()
        return torch.stack([method.x for method in methods])

    expected = torch.stack([run(name, 10, step=0.25, seed=5).x for name in METHODS])
    for found in on_threads(F.n, body):
        assert torch.equal(found, expected)


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
        tried = MethodRun(run(name, 0, step=2.0**i, f=EASY), EASY.value, least)
        tried.advance(20_000)
        if tried.reached:
            costs[i] = tried.cost
    build = lambda step: run(name, 0, step=step, f=EASY)  # noqa: E731
    tuned = tune(build, EASY.value, target=least, budget=20_000, powers=powers)
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
        "winners": quadratic_setting(1e3, 64, Messages(6, 6), 40_000),
        "scaling": largest.setting,
    }
    for table, setting in found.items():
        place = dict(zip(contest.SHARED, setting.shared, strict=True))
        row = published(NAME, table, method=method, seed=0, **place)
        again = contest.run(setting, method, row["power"], 0)
        assert again.reached
        assert again.method.iterations == pytest.approx(row["iterations"], rel=0.02)
