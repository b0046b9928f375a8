"""2Direction's experiments: what they read and refuse; that committed figures are this code's."""

import bz2
import csv
import pickle
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse
from torch import Tensor

from recipes.two_direction import (
    contest,
    data_sets,
    experiment,
    on_ranks,
    scaling,
    softmax_regression,
)
from recipes.two_direction.data_sets import RecipeError, Samples
from tests.recipes.forked_ranks import RECIPES
from tests.support.ranks import on_threads
from torchcomp.algorithms import Ranks, Simulated

FOLDER = RECIPES / "two_direction"
RESULTS = FOLDER / "results"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    # Sums of a batch are split among threads, and round by their number.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rows_of(path: Path) -> list[dict[str, str]]:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# command: python -m recipes.two_direction.")
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


# --- Readers --------------------------------------------------------------------------------------


def test_libsvm_is_read_with_a_column_of_ones(tmp_path: Path) -> None:
    text = "+1 1:0.5 3:2\n# a remark\n-1 2:1e-3\n\n+1 # no words\n"
    path = tmp_path / "words.txt"
    path.write_text(text)
    packed = tmp_path / "words.bz2"
    packed.write_bytes(bz2.compress(text.encode()))
    for samples in (data_sets.libsvm(path, 4), data_sets.libsvm(packed, 4)):
        expected = [[0.5, 0, 2, 0, 1], [0, 1e-3, 0, 0, 1], [0, 0, 0, 0, 1]]
        assert sparse.issparse(samples.features)
        assert samples.features.toarray().tolist() == expected
        assert samples.labels.tolist() == [1, 0, 1]
        assert (samples.classes, samples.d) == (2, 10)
    assert data_sets.libsvm(path).features.shape == (3, 4)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("1 2", "'2' is not index:value"),
        ("1 a:2", "'a:2' is not index:value"),
        ("1 0:1", "index 0, but indices count from 1"),
        ("1 2:1 2:3", "indices must ascend, and 2 follows 2"),
        ("1 5:1", "index 5, but 4 is the highest possible"),
        pytest.param("1 " + "1" * 5000 + ":1", "is not index:value", id="5,000 digits"),
        ("1 1:nan", "the value of feature 1 must be a finite number, not 'nan'"),
        ("1 1:1_0", "the value of feature 1 must be a finite number"),
        ("1 1:\u00ff", "the value of feature 1 must be a finite number"),
        ("1:3 2:4", "the label must be a finite number, not '1:3'"),
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, line: str, told: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_text(f"+1 1:0.5\n\n{line}\n", encoding="latin-1")
    with pytest.raises(RecipeError, match=rf"bad\.txt, line 3: .*{re.escape(told)}"):
        data_sets.libsvm(path, 4)


def test_files_without_use_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("")
    with pytest.raises(RecipeError, match=r"one\.txt has no samples"):
        data_sets.libsvm(path)
    path.write_text("1 1:1\n1 2:1\n")
    with pytest.raises(RecipeError, match="it takes two to tell apart"):
        data_sets.libsvm(path)
    broken = tmp_path / "broken.bz2"
    broken.write_bytes(b"no archive")
    with pytest.raises(RecipeError, match=r"broken\.bz2 cannot be read at all: Invalid data"):
        data_sets.libsvm(broken)
    with pytest.raises(RecipeError, match="nothing is downloaded"):
        data_sets.open_samples("real-sim")


@pytest.mark.parametrize("index", [2**31, 9 * 10**18, 10**22])
def test_an_index_that_no_matrix_can_have_is_refused(tmp_path: Path, index: int) -> None:
    path = tmp_path / "wide.txt"
    path.write_text(f"+1 1:0.5\n-1 {index}:1\n")
    with pytest.raises(RecipeError, match=r"wide\.txt, line 2: .*(highest possible|index:value)"):
        data_sets.libsvm(path)


def test_an_archive_that_ends_early_is_told_with_the_lines_before(tmp_path: Path) -> None:
    path = tmp_path / "cut.bz2"
    whole = bz2.compress(b"+1 1:0.5\n-1 2:1\n" * 10_000)
    path.write_bytes(whole + bz2.compress(b"+1 1:0.5\n" * 99)[:-20])
    with pytest.raises(RecipeError, match=r"cut\.bz2 cannot be read beyond its first .* lines: "):
        data_sets.libsvm(path)


def test_cifar_is_divided_by_255(cifar_archive: Path, cifar_tarball: Path) -> None:
    for path in (cifar_archive, cifar_tarball):
        samples = data_sets.open_samples("cifar10", path)
        assert samples.features.shape == (100, 3073)
        assert (samples.features[:, -1] == 1).all()
        first = pickle.loads((cifar_archive / "data_batch_1").read_bytes())[b"data"][0]
        planes = first.reshape(3, 32, 32).transpose(1, 2, 0).reshape(-1)
        np.testing.assert_allclose(samples.features[0, :-1] * 255, planes)
        assert samples.labels[:20].tolist() == [i % 10 for i in range(20)]


def test_a_cifar_batch_without_its_labels_is_refused(cifar_archive: Path) -> None:
    batch = cifar_archive / "data_batch_3"
    content = pickle.loads(batch.read_bytes())
    batch.write_bytes(pickle.dumps({b"data": content[b"data"]}, protocol=2))
    with pytest.raises(RecipeError, match="data_batch_3 lacks its labels"):
        data_sets.open_samples("cifar10", cifar_archive)
    batch.write_bytes(pickle.dumps({**content, b"labels": [0] * 19}, protocol=2))
    with pytest.raises(RecipeError, match="99 labels for 100 samples: some are missing"):
        data_sets.open_samples("cifar10", cifar_archive)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        (b"labels", [None] * 20, r"whole numbers as its labels, and found \(20,\) of object"),
        (b"labels", [1.5] * 20, "of float64"),
        (b"labels", ["a"] * 20, "of <U1"),
        (b"data", np.full((20, 3072), np.nan), r"bytes .* found \(20, 3072\) of float64"),
        (b"data", np.full((20, 3072), 900), "of int64"),
        (b"data", np.zeros((20, 3000), np.uint8), r"3072 bytes an image .* found \(20, 3000\)"),
        (b"data", None, r"bytes .* found \(\) of object"),
    ],
)
def test_a_cifar_batch_of_other_than_bytes_and_whole_numbers_is_refused(
    cifar_archive: Path, key: bytes, value: object, told: str
) -> None:
    batch = cifar_archive / "data_batch_3"
    batch.write_bytes(pickle.dumps({**pickle.loads(batch.read_bytes()), key: value}))
    with pytest.raises(RecipeError, match=f"data_batch_3: expected .*{told}"):
        data_sets.open_samples("cifar10", cifar_archive)


def test_the_synthetic_problem_has_real_sims_shape() -> None:
    assert (data_sets.REAL_SIM_SAMPLES, data_sets.REAL_SIM_FEATURES) == (72_309, 20_958)
    small, again = (data_sets.synthetic(samples=300, features=200) for _ in range(2))
    assert small.features.shape == (300, 201)
    assert (small.features != again.features).nnz == 0
    assert 0.3 < small.labels.mean() < 0.7
    lengths = np.asarray(small.features[:, :-1].multiply(small.features[:, :-1]).sum(1))
    np.testing.assert_allclose(lengths, 1)


# --- The problem ----------------------------------------------------------------------------------


def samples(count: int = 24, features: int = 5, classes: int = 3, **changes: Any) -> Samples:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, classes, count)
    made = Samples("made", rng.standard_normal((count, features)), labels, classes)
    return replace(made, **changes)


def test_shards_are_equal_and_disjoint() -> None:
    shards = samples(26).shards(4, seed=1)
    assert [len(shard) for shard in shards] == [6] * 4
    assert len({row.tobytes() for shard in shards for row in shard.features}) == 24
    with pytest.raises(RecipeError, match="26 samples cannot be cut into 27 shards"):
        samples(26).shards(27, seed=1)


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
    assert softmax_regression.minimise(forms[0]) == pytest.approx(
        softmax_regression.minimise(forms[1]), abs=1e-9
    )


def test_labels_and_shards_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RecipeError, match="made has 23 labels for 24 samples: some are missing"):
        samples(labels=samples().labels[1:])
    with pytest.raises(RecipeError, match=r"labels \[1, 2\], and its 1 classes"):
        samples(classes=1, labels=samples().labels)
    unequal = [samples(), samples(22)]
    with pytest.raises(RecipeError, match=r"shards have \[22, 24\] samples: they must be equal"):
        softmax_regression.problem(unequal, 0.1)
    with pytest.raises(RecipeError, match=r"differ in \(features, classes\)"):
        softmax_regression.problem([samples(), samples(classes=4)], 0.1)


# --- The contest ----------------------------------------------------------------------------------


def test_a_contest_leaves_a_table_curves_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--mu", "0.1", "--gap", "1e-2", "--seeds", "2", "--out", str(tmp_path)]
    words += ["--methods", "AGD", "EF21-P", "--every", "2", "--powers", "-1", "1"]
    monkeypatch.setattr(sys, "argv", ["recipes/two_direction/experiment.py", *words])
    experiment.main()
    table = capsys.readouterr().out
    assert "digits, 10 workers, d = 650, K = 65, mu = 0.1" in table
    found = rows_of(tmp_path / "digits_n10_mu0.1.csv")
    assert [(row["method"], row["seed"]) for row in found] == [
        ("AGD", "0"),
        ("AGD", "1"),
        ("EF21-P", "0"),
        ("EF21-P", "1"),
    ]
    for row in found:
        dense, kept = 650 * int(row["iterations"]), 65 * int(row["iterations"])
        assert row["reached"] == "True"
        assert int(row["up"]) == dense
        assert int(row["down"]) == (dense if row["method"] == "AGD" else kept)
        assert f"2^{row['power']}" in table
    curves = rows_of(tmp_path / "digits_n10_mu0.1_curves.csv")
    assert {row["method"] for row in curves} == {"AGD", "EF21-P"}
    assert float(curves[-1]["gap"]) <= 1e-2 < float(curves[0]["gap"])
    assert (tmp_path / "digits_n10_mu0.1.png").stat().st_size > 10_000


def test_the_papers_data_are_read_by_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"{'+1' if i % 3 else '-1'} {i % 7 + 1}:1 {20_000 + i}:0.5\n" for i in range(40)]
    path = tmp_path / "real-sim"
    path.write_text("".join(lines))
    words = ["--dataset", "real-sim", "--data", str(path), "--workers", "4", "--mu", "0.1"]
    words += ["--gap", "1e-2", "--seeds", "1", "--methods", "2Direction", "--powers", "1", "2"]
    words += ["--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["recipes/two_direction/experiment.py", *words])
    experiment.main()
    assert "real-sim, 4 workers, d = 41918, K = 4191, mu = 0.1" in capsys.readouterr().out
    (row,) = rows_of(tmp_path / "real-sim_n4_mu0.1.csv")
    assert row["reached"] == "True"


@pytest.mark.parametrize(
    ("lowest", "budget", "taken"),
    [
        # With 2^-1 seed 0 arrives by chance, after 21 coordinates, and seed 1 never. With 2^-2 they
        # need 147 and 31, with 2^-3 93 and 43.
        (-4, 500, -2),
        (-4, 100, -3),
        (-2, 100, -1),
    ],
)
def test_where_a_seed_fails_a_smaller_step_is_taken(lowest: int, budget: int, taken: int) -> None:
    grid = range(lowest, 3)
    setting = contest.Setting(samples(), n=4, mu=0.3, k=1, gap=1e-2, budget=budget, powers=grid)
    power, runs = contest.run_all(setting, "EF21-P + DIANA", seeds=2)
    assert power == taken
    assert [run.reached for run in runs] == [True, taken != -1]
    again = contest.run(setting, "EF21-P + DIANA", power, 0)
    assert runs[0].curve == again.curve


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--workers 0", "--workers must be a whole number of at least 1, not 0"),
        ("--k 0", "--k must be a whole number of at least 1, not 0"),
        ("--mu 1 -1", "--mu must be a finite number above 0, not -1.0"),
        ("--gap nan", "--gap must be a finite number above 0, not nan"),
        ("--powers 2000 2001", "--powers LOW must be a whole number from -1022 to 1,022"),
        ("--powers -2000 -1999", "--powers LOW must be a whole number from -1022 to 1,022"),
        ("--powers 5 2", "--powers HIGH must be a whole number from 5 to 1,022, not 2"),
        ("--powers 7 9 --mu 1e-2", "no step from 2^7 to 2^9 is left to 2Direction"),
        ("--dataset real-sim", "--data is not given"),
        ("--data there", "--data there: --dataset digits reads nothing from there"),
        ("--dataset synthetic --data there", "--dataset synthetic reads nothing from there"),
        ("--k 651 --mu 1", "keeps 651 entries, and there are only 650 coordinates"),
        ("--k 651 --mu 1 --methods AGD EF21", "keeps 651 entries"),
        ("--workers 2000", "1797 samples cannot be cut into 2000 shards"),
        (f"--mu 1 --out {__file__}", "test_two_direction_experiment.py must be a folder"),
    ],
)
def test_bad_input_is_told_in_one_line_before_anything_runs(
    words: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["experiment.py", *words.split()])
    monkeypatch.setattr(experiment, "contest", lambda *_: pytest.fail("it ran"))
    with pytest.raises(SystemExit, match=rf"^error: [^\n]*{re.escape(told)}"):
        experiment.main()


@pytest.mark.parametrize(
    ("program", "words", "told"),
    [
        (scaling, ["--out", __file__], "test_two_direction_experiment.py must be a folder"),
        (on_ranks, ["--gap", "-1"], "--gap must be a finite number above 0, not -1.0"),
    ],
)
def test_bad_input_of_the_other_programs_is_told_in_one_line(
    program: ModuleType, words: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["program.py", *words])
    with pytest.raises(SystemExit, match=rf"^error: [^\n]*{re.escape(told)}"):
        program.main()


# --- What has been committed ----------------------------------------------------------------------


@pytest.mark.parametrize(("mu", "method"), experiment.REFERENCE)
def test_our_reference_points_are_within_the_range_of_five_seeds(mu: float, method: str) -> None:
    found = [r for r in rows_of(RESULTS / f"digits_n10_mu{mu:g}.csv") if r["method"] == method]
    totals = [int(row["total"]) for row in found]
    assert len(totals) == 5
    assert min(totals) <= experiment.REFERENCE[mu, method] <= max(totals)


def test_acceleration_pays_only_where_the_problem_is_ill_conditioned() -> None:
    def median(mu: str, method: str) -> float:
        found = rows_of(RESULTS / f"digits_n10_mu{mu}.csv")
        return statistics.median(int(r["total"]) for r in found if r["method"] == method)

    order = [["2Direction", "AGD", "EF21-P + DIANA"], ["EF21-P + DIANA", "AGD", "2Direction"]]
    for mu, methods in zip(("0.0001", "0.01"), order, strict=True):
        totals = [median(mu, method) for method in methods]
        assert totals == sorted(totals)


@pytest.mark.parametrize("method", ["2Direction", "AGD", "EF21-P + DIANA"])
def test_the_committed_results_are_this_codes(method: str) -> None:
    found = rows_of(RESULTS / "digits_n10_mu0.01.csv")
    committed = next(r for r in found if (r["method"], r["seed"]) == (method, "0"))
    setting = contest.Setting(data_sets.digits(), 10, 1e-2, 65, 1e-6, 3_000_000)
    again = contest.run(setting, method, int(committed["power"]), 0)
    assert again.reached
    # Machines add in different orders: a run may end an iteration sooner or later.
    iterations = again.method.iterations
    assert iterations == pytest.approx(int(committed["iterations"]), rel=0.02)
    assert again.cost == pytest.approx(int(committed["total"]), rel=0.02)


@pytest.mark.parametrize("method", ["2Direction", "AGD", "EF21-P + DIANA"])
def test_iterations_grow_with_the_condition_number_as_in_theory(method: str) -> None:
    found = [r for r in rows_of(RESULTS / "scaling_kappa.csv") if r["method"] == method]
    kappas = [float(row["kappa"]) for row in found]
    slope = scaling.slope(kappas, [int(row["iterations"]) for row in found])
    assert max(kappas) / min(kappas) == pytest.approx(100)
    assert slope == pytest.approx(1.0 if method == "EF21-P + DIANA" else 0.5, abs=0.05)


def test_a_sweep_counts_iterations() -> None:
    point = scaling.Quadratic(kappa=20.0, k_up=30, k_down=30)
    sweep = scaling.Sweep("kappa", "kappa", {"AGD": (point, replace(point, kappa=80.0))}, True)
    counts = scaling.measure(sweep, "AGD")
    assert counts[0].iterations < counts[1].iterations < 200
    assert scaling.slope([1, 10, 100], [3, 30, 300]) == pytest.approx(1)


# --- Real ranks -----------------------------------------------------------------------------------


@pytest.mark.thorough
def test_ranks_have_the_simulations_table() -> None:
    given = on_ranks.setting(gap=0.5)
    expected = on_ranks.line("2Direction", given, Simulated(4))
    assert expected.iterations > 10
    for line in on_threads(4, lambda: on_ranks.line("2Direction", given, Ranks())):
        assert line.facts == expected.facts
        assert on_ranks.table([line]) == on_ranks.table([expected])
        # Three other ranks' frames reach this one, and nothing comes down.
        assert line.link == 3 * line.traffic["up_bytes"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_gloo_ranks_print_the_simulations_table() -> None:
    command = [sys.executable, "-m", "recipes.two_direction.on_ranks"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    simulated, real = re.split(r"\n4 ranks over gloo\n", done.stdout)
    first = simulated.split("simulated, one process\n")[1].strip("\n")
    assert real.startswith(first)
    assert "all 4 ranks and the simulation agree in every bit" in real
