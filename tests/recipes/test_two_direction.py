"""2Direction: the problems and their gradients, races, tuning of steps, and the numbers."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from recipes.errors import RecipeError
from recipes.rows import read_rows
from recipes.two_direction import contest, experiment, quadratics, race
from recipes.two_direction.contest import chance
from recipes.two_direction.data_sets import Samples, open_samples
from recipes.two_direction.methods import Messages
from recipes.two_direction.methods.agd import AGD
from recipes.two_direction.methods.ef21p_diana import EF21PDIANA
from recipes.two_direction.softmax_regression import SoftmaxRegression, minimise
from recipes.two_direction.tuning import MethodRun, tune
from tests.recipes.forked_ranks import RECIPES
from tests.recipes.papers import published, quick
from torchcomp.compressors import RandK, TopK
from torchcomp.engine.keys import Key
from torchcomp.specs.errors import SpecError
from torchcomp.two_direction.parameter_server import Simulated

NAME = "two_direction"
RESULTS = RECIPES / NAME / "results"
F = quadratics.Quadratics(kappa=20.0, n=4, seed=3, d=12)


def samples(count=24, features=4, classes=3):
    rng = np.random.default_rng(0)
    matrix = np.hstack([rng.standard_normal((count, features)), np.ones((count, 1))])
    return Samples("made", matrix, rng.integers(0, classes, count), classes)


# --- Problems -------------------------------------------------------------------------------------


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
    f = SoftmaxRegression(separable.shards(4, seed=0), 0.0)
    assert minimise(f, 1e-8) == 0.0
    mixed = SoftmaxRegression(samples(200, features=2).shards(4, seed=0), 0.0)
    assert minimise(mixed, 1e-8) > 1


def test_quadratics_fall_from_1_to_0_at_their_solution():
    solution = F.mean / F.s
    assert F.value(torch.zeros(12, dtype=torch.float64)) == pytest.approx(1)
    assert F.value(solution) == 0
    gradients = F.gradients(range(4))(solution)
    torch.testing.assert_close(gradients.mean(0), torch.zeros(12, dtype=torch.float64))
    torch.testing.assert_close(F.gradients(range(2, 3))(solution), gradients[2:3])


def test_remembered_draws_are_randks():
    rows = torch.randn(4, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    names, keys = list("abcd"), [Key(3, 5, rank=worker) for worker in range(4)]
    expected = RandK(k=6, unbiased=True).round_trips(rows, names, keys)
    for _ in range(2):
        assert torch.equal(Messages(6, 6).random.round_trips(rows, names, keys), expected)


# --- Races and tuning -----------------------------------------------------------------------------


def small_setting(**changes):
    made = contest.setting(samples(), 4, 0.3, Messages(1, 1), 1e-2, range(-4, 3))
    return replace(made, **{"budget": 500, **changes})


def test_a_reported_seed_chooses_no_step():
    setting, tuned_on = small_setting(), list[int]()

    def recorded(seed):
        tuned_on.append(seed)
        return setting.case(seed)

    best = race.tuned(replace(setting, case=recorded), "EF21-P + DIANA", seeds=(0, 1))
    assert set(tuned_on) <= {1000, 1001}
    found = list(race.measure(setting, "EF21-P + DIANA", (3, 0), []))
    assert [(seed, power) for power, seed, _ in found] == [(3, best.power), (0, best.power)]


def test_a_method_that_fails_has_one_row_of_the_tuning_seed():
    failed = list(race.measure(small_setting(gap=1e-12), "EF14", (0, 1), []))
    assert [(seed, done.reached) for _, seed, done in failed] == [(1000, False)]
    known = [{"seed": 1000, "power": 0}]
    assert list(race.measure(small_setting(), "EF14", (0, 1), known)) == []


BUILDS = {
    "AGD": lambda step: AGD(F.gradients(range(4)), X0, Simulated(4), lbar=1 / step, mu=F.mu),
    "EF21-P + DIANA": lambda step: EF21PDIANA(
        F.gradients(range(4)), X0, Simulated(4), RandK(k=4, unbiased=True), TopK(k=4), gamma=step
    ),
}
X0 = torch.zeros(12, dtype=torch.float64)


@pytest.mark.parametrize("name", BUILDS)
def test_tuning_finds_what_trying_everything_finds(name):
    powers, costs = range(-3, 3), {}
    for i in powers:
        run = MethodRun(BUILDS[name](2.0**i), F.value, 1e-6)
        run.advance(20_000)
        if run.reached:
            costs[i] = run.cost
    tuned = tune(BUILDS[name], F.value, target=1e-6, budget=20_000, powers=powers)
    assert (tuned.power, tuned.run.cost) == min(costs.items(), key=lambda item: item[1])
    assert sorted([*tuned.abandoned, tuned.power]) == list(powers)


def test_a_price_changes_the_coin_only_where_the_downlink_is_dear():
    assert chance(Messages(65, 65), 1.0) is None
    assert chance(Messages(65, 33), 0.25) is None
    found = chance(Messages(65, 33), 1.0)
    assert found is not None
    assert found.p < 0.1


# --- The experiment -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["2Direction", "AGD", "EF21-P + DIANA"])
def test_the_coordinates_of_a_run_are_reproduced(method):
    row = published(NAME, "contest_digits_n10", method=method, mu=1e-2, seed=0)
    again = race.run(contest.setting(open_samples(), 10, 1e-2), method, row["power"], 0)
    assert again.reached
    # Machines add in different orders, so a run can end some iterations sooner or later.
    assert again.cost == pytest.approx(row["up"] + row["down"], rel=0.02)


def test_a_quick_part_runs_and_resumes(tmp_path, monkeypatch):
    flags = ("--only", "contest", "--mu", "1e-2", "--methods", "AGD")
    quick(NAME, tmp_path, monkeypatch, *flags)
    assert [path.name for path in tmp_path.glob("*.png")] == ["contest_digits_n10.png"]
    assert len(read_rows(tmp_path / "contest_digits_n10_curves.csv")) > 5


@pytest.mark.thorough
def test_the_quick_run(tmp_path, monkeypatch):
    quick(NAME, tmp_path, monkeypatch)
    assert {"contest_digits_n10", "winners"} <= {path.stem for path in tmp_path.glob("*.png")}


@pytest.mark.parametrize(
    "words",
    [["--k", "0"], ["--mu", "-1"], ["--gap", "0"], ["--powers", "3", "1"], ["--workers", "0"]],
)
def test_bad_flags(words):
    with pytest.raises((RecipeError, SpecError), match=words[0]):
        experiment.parse(words)
