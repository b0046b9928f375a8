"""2Direction: the problems and their gradients, races, tuning of steps, and the numbers."""

import bz2
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse
from torch import Tensor

from recipes.errors import RecipeError
from recipes.rows import read_rows
from recipes.two_direction import contest, experiment, quadratics, race, softmax_regression, tables
from recipes.two_direction.contest import MUS, WORKERS, chance
from recipes.two_direction.data_sets import Samples, digits, libsvm, synthetic
from recipes.two_direction.methods import METHODS, Messages
from recipes.two_direction.tuning import MethodRun, tune
from tests.recipes.forked_ranks import RECIPES
from tests.recipes.papers import published, quick
from torchcomp.algorithms.agd import AGD
from torchcomp.algorithms.ef21p_diana import EF21PDIANA
from torchcomp.algorithms.parameter_server import Simulated
from torchcomp.compressors import RandK, TopK
from torchcomp.errors import SpecError
from torchcomp.keys import Key

NAME = "two_direction"
RESULTS = RECIPES / NAME / "results"
F = quadratics.Quadratics(kappa=20.0, n=4, seed=3, d=12)


def samples(count: int = 24, features: int = 4, classes: int = 3) -> Samples:
    rng = np.random.default_rng(0)
    matrix = np.hstack([rng.standard_normal((count, features)), np.ones((count, 1))])
    return Samples("made", matrix, rng.integers(0, classes, count), classes)


# --- Problems -------------------------------------------------------------------------------------


def test_dense_and_sparse_gradients_are_autograds() -> None:
    mu, shards = 0.1, samples().shards(4, seed=0)
    thin = [replace(shard, features=sparse.csr_matrix(shard.features)) for shard in shards]
    forms = [softmax_regression.problem(each, mu) for each in (shards, thin)]
    assert [type(form).__name__ for form in forms] == ["Dense", "Sparse"]
    x = torch.randn(15, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def loss(shard: Samples, x: Tensor) -> Tensor:
        scores = torch.from_numpy(shard.features) @ x.view(5, 3)
        fit = torch.nn.functional.cross_entropy(scores, torch.from_numpy(shard.labels))
        return fit + mu / 2 * x.square().sum()

    x.requires_grad_()
    losses = [loss(shard, x) for shard in shards]
    expected = torch.stack([torch.autograd.grad(each, x)[0] for each in losses])
    x = x.detach()
    for form in forms:
        torch.testing.assert_close(form.gradients(range(4))(x), expected)
        torch.testing.assert_close(form.gradients(range(2, 3))(x), expected[2:3])
        assert form.value(x) == pytest.approx(torch.stack(losses).mean().item())
    least = [softmax_regression.minimise(form, 1e-10) for form in forms]
    assert least[0] == pytest.approx(least[1], abs=1e-9)


def test_the_infimum_without_a_regulariser() -> None:
    # One feature separates the classes, so f tends to 0 and has no minimum.
    labels = np.arange(24) % 2
    separable = replace(samples(classes=2), labels=labels, features=labels[:, None] * 2.0 - 1.0)
    f = softmax_regression.problem(separable.shards(4, seed=0), 0.0)
    assert softmax_regression.minimise(f, 1e-8) == 0.0
    mixed = softmax_regression.problem(samples(200, features=2).shards(4, seed=0), 0.0)
    assert softmax_regression.minimise(mixed, 1e-8) > 1


def test_quadratics_fall_from_1_to_0_at_their_solution() -> None:
    solution = F.mean / F.s
    assert F.value(torch.zeros(12, dtype=torch.float64)) == pytest.approx(1)
    assert F.value(solution) == 0
    gradients = F.gradients(range(4))(solution)
    torch.testing.assert_close(gradients.mean(0), torch.zeros(12, dtype=torch.float64))
    torch.testing.assert_close(F.gradients(range(2, 3))(solution), gradients[2:3])


def test_a_libsvm_file_is_read_with_a_column_of_ones(tmp_path: Path) -> None:
    text = "+1 1:0.5 3:2\n-1 2:1\n"
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.bz2").write_bytes(bz2.compress(text.encode()))
    for name in ("a.txt", "a.bz2"):
        found = libsvm(tmp_path / name, 3)
        assert found.features.toarray().tolist() == [[0.5, 0, 2, 1], [0, 1, 0, 1]]
        assert found.labels.tolist() == [1, 0]


@pytest.mark.parametrize("text", ["", "+1 1:a\n-1 1:1\n", "1 1:1\n1 1:2\n", "+1 1:nan\n-1 1:1\n"])
def test_a_bad_libsvm_file_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_text(text)
    with pytest.raises(RecipeError, match=r"bad\.txt"):
        libsvm(tmp_path / "bad.txt", 3)


def test_the_synthetic_problem_has_words_of_zipfs_law() -> None:
    made = synthetic(samples=400, features=50)
    counts = np.asarray((made.features[:, :50] > 0).sum(0)).ravel()
    assert counts[0] > counts[9] > counts[49] > 0
    assert 0.3 < made.labels.mean() < 0.7


def test_remembered_draws_are_randks() -> None:
    rows = torch.randn(4, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    names, keys = list("abcd"), [Key(3, 5, rank=worker) for worker in range(4)]
    expected = RandK(k=6, unbiased=True).round_trips(rows, names, keys)
    for _ in range(2):
        assert torch.equal(Messages(6, 6).random.round_trips(rows, names, keys), expected)


# --- Races and tuning -----------------------------------------------------------------------------


def small_setting(**changes: Any) -> race.Setting:
    made = contest.setting(samples(), 4, 0.3, Messages(1, 1), 1e-2, range(-4, 3))
    return replace(made, **{"budget": 500, **changes})


def test_a_reported_seed_chooses_no_step() -> None:
    setting, tuned_on = small_setting(), list[int]()

    def recorded(seed: int) -> Any:
        tuned_on.append(seed)
        return setting.case(seed)

    best = race.tuned(replace(setting, case=recorded), "EF21-P + DIANA", seeds=(0, 1))
    assert set(tuned_on) <= {1000, 1001}
    found = list(race.measure(setting, "EF21-P + DIANA", (3, 0), []))
    assert [(seed, power) for power, seed, _ in found] == [(3, best.power), (0, best.power)]


def test_a_method_that_fails_has_one_row_of_the_tuning_seed() -> None:
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
def test_tuning_finds_what_trying_everything_finds(name: str) -> None:
    powers, costs = range(-3, 3), {}
    for i in powers:
        run = MethodRun(BUILDS[name](2.0**i), F.value, 1e-6)
        run.advance(20_000)
        if run.reached:
            costs[i] = run.cost
    tuned = tune(BUILDS[name], F.value, target=1e-6, budget=20_000, powers=powers)
    assert (tuned.power, tuned.run.cost) == min(costs.items(), key=lambda item: item[1])
    assert sorted([*tuned.abandoned, tuned.power]) == list(powers)


def test_tuning_without_candidates_or_survivors_is_refused() -> None:
    with pytest.raises(SpecError, match="powers"):
        tune(BUILDS["AGD"], F.value, target=0.0, budget=10, powers=[])
    with pytest.raises(SpecError, match="19, 20"):
        tune(BUILDS["EF21-P + DIANA"], F.value, target=0.0, budget=10**6, powers=[19, 20])


def test_a_price_changes_the_coin_only_where_the_downlink_is_dear() -> None:
    assert chance(Messages(65, 65), 1.0) is None
    assert chance(Messages(65, 33), 0.25) is None
    found = chance(Messages(65, 33), 1.0)
    assert found is not None
    assert found.p < 0.1


# --- The experiment -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["2Direction", "AGD", "EF21-P + DIANA"])
def test_the_coordinates_of_a_run_are_reproduced(method: str) -> None:
    row = published(NAME, "contest_digits_n10", method=method, mu=1e-2, seed=0)
    again = race.run(contest.setting(digits(), 10, 1e-2), method, row["power"], 0)
    assert again.reached
    # Machines add in different orders, so a run can end some iterations sooner or later.
    assert again.cost == pytest.approx(row["up"] + row["down"], rel=0.02)


@pytest.mark.parametrize(("mu", "method"), tables.REFERENCE)
def test_our_results_are_those_of_other_programs(mu: float, method: str) -> None:
    rows = tables.where(read_rows(RESULTS / "contest_digits_n10.csv"), mu=mu, method=method)
    found = tables.reached(rows, tables.thousands)
    assert found is not None
    assert found.mean == pytest.approx(tables.REFERENCE[mu, method] / 1000, rel=0.05)


@pytest.mark.parametrize("n", WORKERS)
def test_every_method_was_run_with_every_mu(n: int) -> None:
    rows = read_rows(RESULTS / f"contest_digits_n{n}.csv")
    assert {(row["method"], row["mu"]) for row in rows} == {(m, mu) for m in METHODS for mu in MUS}


def test_a_quick_part_runs_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--only", "contest", "--mu", "1e-2", "--methods", "AGD")
    quick(NAME, tmp_path, monkeypatch, *flags)
    assert [path.name for path in tmp_path.glob("*.png")] == ["contest_digits_n10.png"]
    assert len(read_rows(tmp_path / "contest_digits_n10_curves.csv")) > 5


@pytest.mark.thorough
def test_the_quick_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(NAME, tmp_path, monkeypatch)
    assert {"alpha", "scaling", "winners"} <= {path.stem for path in tmp_path.glob("*.png")}


@pytest.mark.parametrize(
    "words",
    [["--k", "0"], ["--mu", "-1"], ["--gap", "0"], ["--powers", "3", "1"], ["--workers", "0"]],
)
def test_bad_flags(words: list[str]) -> None:
    with pytest.raises((RecipeError, SpecError), match=words[0]):
        experiment.parse(words)
