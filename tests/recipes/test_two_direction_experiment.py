"""2Direction's experiments: data, flags, resuming, bad input, and the committed results."""

import bz2
import csv
import pickle
import re
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse
from torch import Tensor

from recipes import result_files
from recipes.errors import RecipeError
from recipes.two_direction import (
    contest,
    contest_table,
    data_sets,
    experiment,
    on_ranks,
    pictures,
    scaling,
    softmax_regression,
)
from recipes.two_direction.contest_table import ContestRow
from recipes.two_direction.data_sets import Samples
from tests.recipes.forked_ranks import RECIPES
from tests.support.ranks import on_threads
from torchcomp.algorithms import Ranks, Simulated

FOLDER = RECIPES / "two_direction"
RESULTS = FOLDER / "results"


pytestmark = pytest.mark.usefixtures("one_thread")


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
    ("line", "problem"),
    [
        ("1 2", "'2'.*index:value"),
        ("1 a:2", "'a:2'.*index:value"),
        ("1 0:1", "index 0.* 1"),
        ("1 2:1 2:3", "indices.*2.*2"),
        ("1 5:1", "index 5.* 4"),
        pytest.param("1 " + "1" * 5000 + ":1", "index:value", id="5,000 digits"),
        ("1 1:nan", "feature 1.*'nan'"),
        ("1 1:1_0", "feature 1.*'1_0'"),
        ("1 1:\u00ff", "feature 1 "),
        ("1:3 2:4", "label.*'1:3'"),
    ],
)
def test_errors_name_the_malformed_line(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_text(f"+1 1:0.5\n\n{line}\n", encoding="latin-1")
    with pytest.raises(RecipeError, match=rf"bad\.txt, line 3: .*{problem}"):
        data_sets.libsvm(path, 4)


def test_files_without_use_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("")
    with pytest.raises(RecipeError, match=r"one\.txt .*\+1 3:0\.5"):
        data_sets.libsvm(path)
    path.write_text("1 1:1\n1 2:1\n")
    with pytest.raises(RecipeError, match=r"one\.txt: .* 1\b"):
        data_sets.libsvm(path)
    broken = tmp_path / "broken.bz2"
    broken.write_bytes(b"no archive")
    with pytest.raises(RecipeError, match=r"broken\.bz2 .*Invalid data"):
        data_sets.libsvm(broken)
    with pytest.raises(RecipeError, match=r"--data.*real-sim"):
        data_sets.open_samples("real-sim")


@pytest.mark.parametrize("index", [2**31, 9 * 10**18, 10**22])
def test_an_index_that_no_matrix_can_have_is_refused(tmp_path: Path, index: int) -> None:
    path = tmp_path / "wide.txt"
    path.write_text(f"+1 1:0.5\n-1 {index}:1\n")
    with pytest.raises(RecipeError, match=r"wide\.txt, line 2: .*(index \d|index:value)"):
        data_sets.libsvm(path)


def test_the_error_of_a_truncated_archive_counts_the_lines_before(tmp_path: Path) -> None:
    path = tmp_path / "cut.bz2"
    whole = bz2.compress(b"+1 1:0.5\n-1 2:1\n" * 10_000)
    path.write_bytes(whole + bz2.compress(b"+1 1:0.5\n" * 99)[:-20])
    with pytest.raises(RecipeError, match=r"cut\.bz2 .*\b[\d,]+ lines: "):
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
    with pytest.raises(RecipeError, match=r"data_batch_3 .*labels"):
        data_sets.open_samples("cifar10", cifar_archive)
    batch.write_bytes(pickle.dumps({**content, b"labels": [0] * 19}, protocol=2))
    with pytest.raises(RecipeError, match=r"cifar10.* 99 .* 100 "):
        data_sets.open_samples("cifar10", cifar_archive)


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        (b"labels", [None] * 20, r"labels.* \(20,\) .*object"),
        (b"labels", [1.5] * 20, "labels.* float64"),
        (b"labels", ["a"] * 20, "labels.* <U1"),
        (b"data", np.full((20, 3072), np.nan), r"data.* \(20, 3072\) .*float64"),
        (b"data", np.full((20, 3072), 900), "data.* int64"),
        (b"data", np.zeros((20, 3000), np.uint8), r"data.*3072.* \(20, 3000\)"),
        (b"data", None, r"data.* \(\) .*object"),
    ],
)
def test_a_cifar_batch_of_other_than_bytes_and_integers_is_refused(
    cifar_archive: Path, key: bytes, value: object, found: str
) -> None:
    batch = cifar_archive / "data_batch_3"
    batch.write_bytes(pickle.dumps({**pickle.loads(batch.read_bytes()), key: value}))
    with pytest.raises(RecipeError, match=f"data_batch_3: .*{found}"):
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
    with pytest.raises(RecipeError, match=r"26 .* 27 "):
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
    with pytest.raises(RecipeError, match=r"made.* 23 .* 24 "):
        samples(labels=samples().labels[1:])
    with pytest.raises(RecipeError, match=r"\[1, 2\].* 1 "):
        samples(classes=1, labels=samples().labels)
    unequal = [samples(), samples(22)]
    with pytest.raises(RecipeError, match=r"shards.*\[22, 24\]"):
        softmax_regression.problem(unequal, 0.1)
    with pytest.raises(RecipeError, match=r"\(5, 3\).*\(5, 4\)"):
        softmax_regression.problem([samples(), samples(classes=4)], 0.1)


# --- The contest ----------------------------------------------------------------------------------


def test_a_contest_leaves_a_table_curves_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--only",
        "contest",
        "--mu",
        "0.1",
        "--gap",
        "1e-2",
        "--seeds",
        "2",
        "--out",
        str(tmp_path),
    ]
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
    words = ["--only", "contest", "--dataset", "real-sim", "--data", str(path)]
    words += ["--workers", "4", "--mu", "0.1"]
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
        # With 2^-1, seed 0 reaches the gap by chance after 21 coordinates, and seed 1 never does.
        # With 2^-2 they need 147 and 31 coordinates, with 2^-3 93 and 43.
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


SMALL = ["--only", "contest", "--mu", "0.1", "--gap", "1e-1", "--seeds", "2", "--powers", "-1", "1"]


def run_main(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["recipes/two_direction/experiment.py", *words])
    experiment.main()


def test_resume_runs_only_the_missing_methods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*SMALL, "--out", str(tmp_path)]
    run_main(monkeypatch, *words, "--methods", "AGD", "EF21-P")
    path, curves = tmp_path / "digits_n10_mu0.1.csv", tmp_path / "digits_n10_mu0.1_curves.csv"
    whole, whole_curves = rows_of(path), rows_of(curves)
    # An interruption between the two files: the curves of EF21-P are saved, and its rows are not.
    lines = [line for line in path.read_text().splitlines(True) if not line.startswith("EF21-P")]
    path.write_text("".join(lines))
    measured: list[str] = []
    run_all = contest_table.run_all

    def recorded(setting: contest.Setting, method: str, seeds: int) -> Any:
        measured.append(method)
        return run_all(setting, method, seeds)

    monkeypatch.setattr(contest_table, "run_all", recorded)
    run_main(monkeypatch, *words, "--methods", "AGD", "EF21-P", "--resume")
    assert measured == ["EF21-P"]
    assert (rows_of(path), rows_of(curves)) == (whole, whole_curves)
    before = path.read_bytes()
    with pytest.raises(SystemExit, match=r"^error.*--resume.*mu0\.1\.csv.* 3 seeds"):
        run_main(monkeypatch, *words, "--seeds", "3", "--resume")
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--workers 0", "--workers.* 1, not 0"),
        ("--k 0", "--k .* 1, not 0"),
        ("--mu 1 -1", r"--mu.* not -1\.0"),
        ("--gap nan", "--gap.* nan"),
        ("--only ranks --gap -1", r"--gap.* -1\.0"),
        ("--powers 2000 2001", "--powers LOW.* -1022 to 1,022"),
        ("--powers -2000 -1999", "--powers LOW.* -1022 to 1,022"),
        ("--powers 5 2", "--powers HIGH.* 5 to 1,022, not 2"),
        ("--powers 7 9 --mu 1e-2", "--powers 7 9.*2Direction.* 100"),
        ("--dataset real-sim", "--data .*real-sim"),
        ("--data there", "--data there.*digits"),
        ("--dataset synthetic --data there", "--data there.*synthetic"),
        ("--k 651 --mu 1", " 651 .* 650 "),
        ("--k 651 --mu 1 --methods AGD EF21", " 651 "),
        ("--workers 2000", " 1797 .* 2000 |1797 .* 2000 "),
        (f"--mu 1 --out {__file__}", "--out.*test_two_direction_experiment.py"),
        (f"--only scaling --out {__file__}", "--out.*test_two_direction_experiment.py"),
        (f"--quick --out {RESULTS}", "--quick.*--out .*results"),
        (f"--resume --only contest --seeds 4 --mu 1e-2 --out {RESULTS}", "--resume.* 5 .* 4 seeds"),
        ("--only learning", "--only.*learning"),
        ("--sweeps mu", "--sweeps.*mu"),
    ],
)
def test_bad_input_ends_in_one_line_before_anything_runs(
    words: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in [(experiment, "run_contest"), (scaling, "run_sweep")]:
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("it ran"))
    monkeypatch.setattr(on_ranks, "run_ranks", lambda *_: pytest.fail("it ran"))
    monkeypatch.setattr(result_files, "write_csv", lambda *_, **__: pytest.fail("it wrote"))
    with pytest.raises(SystemExit, match=rf"^error[^\n]*:[^\n]*({problem})[^\n]*$"):
        run_main(monkeypatch, *words.split())


def test_quick_and_unpublished_settings_do_not_write_to_the_committed_results() -> None:
    assert experiment.parse([]).out == RESULTS
    assert experiment.parse(["--mu", "1e-2"]).out == RESULTS
    assert experiment.parse(["--quick"]).out == Path("runs/two_direction-quick")
    assert experiment.parse(["--seeds", "1"]).out == Path("runs/two_direction")


def test_flags_that_are_named_win_over_the_quick_ones() -> None:
    quick = experiment.parse(["--quick", "--gap", "1e-3", "--only", "ranks", "ranks"])
    assert (quick.gap, quick.seeds, quick.only) == (1e-3, 2, ["ranks"])


def test_the_titles_are_computed_from_the_rows() -> None:
    def rows(method: str, *totals: int, reached: bool = True) -> list[ContestRow]:
        zeros = (0, 0.0, 0, 0)
        return [ContestRow(method, 1, i, reached, *zeros, t, 0, 0) for i, t in enumerate(totals)]

    ours, agd = rows("2Direction", 90, 100, 200), rows("AGD", 250, 250, 250)
    failed = rows("EF21", 10, reached=False)
    title = pictures.contest_title([*ours, *agd, *rows("EF21-P", 150), *failed], 1e-3)
    assert re.search(r"0\.001: 2Direction.*1\.50x.*EF21-P; 2\.50x.*AGD$", title)
    slower = pictures.contest_title([*ours, *rows("AGD", 50), *rows("EF21-P", 60)], 1e-3)
    assert re.search(r": AGD.* 2\.00x.*2Direction$", slower)
    assert "x fewer" not in pictures.contest_title([*ours, *failed], 1e-3)
    sweep = scaling.sweeps()[2]
    counts = [
        scaling.Count(method, x, int(factor * x), x, 0)
        for method, factor in (("2Direction", 10), ("EF21-P + DIANA", 25))
        for x in (1, 4)
    ]
    assert re.search(r"^2Direction.* 2\.5x.*DIANA\n.*= 4$", pictures.sweep_title(counts, sweep))


# --- The committed results ------------------------------------------------------------------------


@pytest.mark.parametrize(("mu", "method"), contest_table.REFERENCE)
def test_our_reference_points_are_within_the_range_of_five_seeds(mu: float, method: str) -> None:
    found = [r for r in rows_of(RESULTS / f"digits_n10_mu{mu:g}.csv") if r["method"] == method]
    totals = [int(row["total"]) for row in found]
    assert len(totals) == 5
    assert min(totals) <= contest_table.REFERENCE[mu, method] <= max(totals)


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
    # Machines add in different orders, so a run can end some iterations sooner or later.
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


def small_sweep() -> scaling.Sweep:
    point = scaling.Quadratic(kappa=20.0, k_up=30, k_down=30)
    points = (point, replace(point, kappa=80.0))
    return scaling.Sweep("condition number", "kappa", {"AGD": points}, one_step=True)


def test_a_sweep_counts_iterations() -> None:
    counts = list(scaling.measure(small_sweep(), "AGD"))
    assert counts[0].iterations < counts[1].iterations < 200
    assert scaling.slope([1, 10, 100], [3, 30, 300]) == pytest.approx(1)


def test_a_resumed_sweep_measures_only_the_missing_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = small_sweep()
    table = scaling.open_table(sweep, tmp_path, resume=False)
    scaling.run_sweep(sweep, table)
    pictures.draw_sweep(table.path, sweep)
    assert (tmp_path / "scaling_kappa.png").stat().st_size > 10_000
    whole = table.rows
    table.rows = whole[:1]
    table.save()
    measured: list[float] = []
    tuned = scaling._tuned

    def recorded(sweep: scaling.Sweep, point: scaling.Quadratic, *options: Any) -> scaling.Count:
        measured.append(point.kappa)
        return tuned(sweep, point, *options)

    monkeypatch.setattr(scaling, "_tuned", recorded)
    again = scaling.open_table(sweep, tmp_path, resume=True)
    scaling.run_sweep(sweep, again)
    assert measured == [80.0]
    assert again.rows == whole


# --- Real ranks -----------------------------------------------------------------------------------


@pytest.mark.thorough
def test_ranks_equal_the_simulation() -> None:
    setting = on_ranks.setting(gap=0.5)
    expected = on_ranks.run_method("2Direction", setting, Simulated(4))
    assert expected.iterations > 10
    for run in on_threads(4, lambda: on_ranks.run_method("2Direction", setting, Ranks())):
        assert run.exact == expected.exact
        on_ranks.compare(0, [run], [expected])
        # The messages of three other ranks reach this one, and nothing comes down.
        assert run.received == 3 * run.traffic["up_bytes"]
        other = replace(run, x=(*run.x[:-1], run.x[-1] + 1e-15))
        with pytest.raises(RecipeError, match=r"2Direction.* 3 "):
            on_ranks.compare(3, [other], [expected])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_quick_runs_all_parts_and_resume_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--quick", "--out", str(tmp_path)]
    run_main(monkeypatch, *words)
    tables = sorted(path.name for path in tmp_path.glob("*.csv"))
    sweeps = [f"scaling_{name}.csv" for name in sorted(scaling.SWEEPS)]
    contests = ["digits_n10_mu0.01.csv", "digits_n10_mu0.01_curves.csv"]
    assert tables == [*contests, "on_ranks.csv", *sweeps]
    assert [row["method"] for row in rows_of(tmp_path / "on_ranks.csv")] == list(on_ranks.POWERS)
    before = {name: (tmp_path / name).read_bytes() for name in tables}
    run_main(monkeypatch, *words, "--resume")
    assert {name: (tmp_path / name).read_bytes() for name in tables} == before


def test_the_committed_run_on_ranks_has_every_method() -> None:
    rows = rows_of(RESULTS / "on_ranks.csv")
    assert [row["method"] for row in rows] == list(on_ranks.POWERS)
    for row in rows:
        assert int(row["received_by_rank"]) == 3 * int(row["bytes_up"])
