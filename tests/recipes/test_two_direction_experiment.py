"""2Direction's experiments: data, flags, resuming, bad input, and the committed results."""

import bz2
import pickle
import shutil
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
from recipes.experiments import ResultTable
from recipes.two_direction import (
    contest,
    data_sets,
    experiment,
    on_ranks,
    outcomes,
    pictures,
    race,
    scaling,
    softmax_regression,
    sweeps,
    tables,
)
from recipes.two_direction.data_sets import Samples
from recipes.two_direction.methods import ACCELERATED, METHODS, Messages
from recipes.two_direction.quadratics import Quadratics
from tests.recipes.forked_ranks import RECIPES
from tests.support.cases import thorough
from tests.support.ranks import on_threads
from torchcomp.compressors import RandK
from torchcomp.keys import Key
from torchcomp.two_direction import Ranks, Simulated
from torchcomp.two_direction.theory import Probabilities

FOLDER = RECIPES / "two_direction"
RESULTS = FOLDER / "results"


def rows_of(path: Path) -> list[dict[str, str]]:
    return result_files.read_csv(path)


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
    least = [softmax_regression.minimise(form, 1e-10) for form in forms]
    assert least[0] == pytest.approx(least[1], abs=1e-9)


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


def test_the_infimum_without_a_regulariser() -> None:
    # One feature separates the classes, so f tends to 0 and has no minimum.
    labels = np.arange(24) % 2
    separable = replace(samples(classes=2), labels=labels, features=labels[:, None] * 2.0 - 1.0)
    f = softmax_regression.problem(separable.shards(4, seed=0), 0.0)
    assert softmax_regression.minimise(f, 1e-8) == 0.0
    # Random labels cannot be separated: the minimum is where the gradient vanishes.
    mixed = softmax_regression.problem(samples(200, features=2).shards(4, seed=0), 0.0)
    least = softmax_regression.minimise(mixed, 1e-8)
    close = softmax_regression.problem(samples(200, features=2).shards(4, seed=0), 1e-9)
    assert least == pytest.approx(softmax_regression.minimise(close, 1e-8), abs=1e-7)
    assert least > 1


def test_an_infimum_that_is_too_uncertain_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax_regression, "_ROUNDS", 1)
    monkeypatch.setattr(softmax_regression, "_ITERATIONS", 2)
    f = softmax_regression.problem(samples(200).shards(4, seed=0), 1e-3)
    with pytest.raises(RecipeError, match=r"f\*.*--gap.* mu .*0\.001"):
        softmax_regression.minimise(f, 1e-8)


def test_quadratics_fall_from_1_to_0_at_their_solution() -> None:
    f = Quadratics(kappa=100.0, n=4, seed=3, d=7)
    solution = f.mean / f.s
    assert f.value(torch.zeros(7, dtype=torch.float64)) == pytest.approx(1)
    assert f.value(solution) == 0
    gradients = f.gradients(range(4))(solution)
    torch.testing.assert_close(gradients.mean(0), torch.zeros(7, dtype=torch.float64))
    assert (f.s[0].item(), f.s[-1].item()) == pytest.approx((0.01, 1.0))
    torch.testing.assert_close(f.gradients(range(2, 3))(solution), gradients[2:3])


# --- The race -------------------------------------------------------------------------------------


def small_setting(budget: int = 500, powers: range = range(-4, 3), **changes: Any) -> race.Setting:
    made = contest.setting(samples(), 4, 0.3, Messages(1, 1), contest.Options(1e-2, budget, powers))
    return replace(made, **changes)


def test_remembered_draws_are_randks() -> None:
    rows = torch.randn(4, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    names, keys = list("abcd"), [Key(3, 5, rank=worker) for worker in range(4)]
    expected = RandK(k=6, unbiased=True).round_trips(rows, names, keys)
    for _ in range(2):
        assert torch.equal(Messages(6, 6).random.round_trips(rows, names, keys), expected)
    other = [replace(key, step=6) for key in keys]
    assert not torch.equal(Messages(6, 6).random.round_trips(rows, names, other), expected)


def test_a_reported_seed_chooses_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = small_setting()
    tuned_on: list[int] = []
    case = setting.case

    def recorded(seed: int) -> Any:
        tuned_on.append(seed)
        return case(seed)

    best = race.tuned(replace(setting, case=recorded), "EF21-P + DIANA", seeds=(0, 1))
    assert tuned_on[0] == 1000
    assert set(tuned_on) <= {1000, 1001}
    found = list(race.measure(setting, "EF21-P + DIANA", (3, 0), []))
    assert [(row.seed, row.power) for row, _ in found] == [(3, best.power), (0, best.power)]
    again = race.run(setting, "EF21-P + DIANA", best.power, 0)
    assert found[1][1].curve == again.curve


def test_a_step_that_fails_on_the_second_tuning_seed_is_made_smaller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setting = small_setting()
    first = race.tuned(setting, "EF21-P + DIANA", (0,)).power
    run = race.run

    def fails_once(own: race.Setting, method: str, power: int, seed: int) -> Any:
        return run(replace(own, budget=1) if power == first else own, method, power, seed)

    monkeypatch.setattr(race, "run", fails_once)
    assert race.tuned(setting, "EF21-P + DIANA", (0,)).power == first - 1


def test_a_method_that_fails_has_one_row_of_the_tuning_seed() -> None:
    setting = small_setting(budget=20)
    ((row, _),) = race.measure(setting, "EF14", (0, 1), [])
    assert (row.seed, row.reached) == (1000, False)
    assert not list(race.measure(setting, "EF14", (0, 1, 2), [row]))


def test_more_seeds_extend_the_rows_with_the_same_step() -> None:
    setting = small_setting()
    rows = [row for row, _ in race.measure(setting, "EF21-P", (0, 1), [])]
    moved = [replace(row, power=row.power - 1) for row in rows]
    more = [row for row, _ in race.measure(setting, "EF21-P", (0, 1, 2), moved)]
    assert [(row.seed, row.power) for row in more] == [(2, moved[0].power)]


def test_a_reported_seed_that_fails_does_not_stop_later_ones() -> None:
    setting = small_setting()
    rows = [row for row, _ in race.measure(setting, "EF21-P", (0, 1), [])]
    known = [rows[0], replace(rows[1], reached=False)]
    more = [row.seed for row, _ in race.measure(setting, "EF21-P", (2, 3), known)]
    assert more == [2, 3]


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    table = ResultTable(tmp_path / "rows.csv", race.COLUMNS, "small", resume=False)
    chance = Probabilities(1 / 7, 0.3)
    setting = small_setting(budget=20_000, sent=Messages(2, 3, chance))
    race.race(setting, ["2Direction", "AGD"], (0,), table)
    rows = outcomes.read_rows(table.path)
    assert rows == race.rows_of(table)
    assert {row.shared for row in rows} == {setting.shared}
    assert (rows[0].p, rows[0].k_up, rows[0].k_down) == (1 / 7, 2, 3)


# --- The parts ------------------------------------------------------------------------------------


SMALL = ["--only", "contest", "--workers", "10", "--mu", "0.1", "--gap", "1e-1"]
SMALL += ["--seeds", "0,1", "--powers", "-1", "1"]


def run_main(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["recipes/two_direction/experiment.py", *words])
    experiment.main()


def test_a_contest_leaves_a_table_curves_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "--mu", "0", "0.1", "--methods", "AGD", "EF21-P", "--out", str(tmp_path)]
    run_main(monkeypatch, *words)
    assert "digits, mu = 0.1, 10 workers, K = 65 up" in capsys.readouterr().out
    found = outcomes.read_rows(tmp_path / "contest_digits_n10.csv")
    expected = [
        (mu, method, seed) for method in ("AGD", "EF21-P") for mu in (0, 0.1) for seed in (0, 1)
    ]
    assert [(row.mu, row.method, row.seed) for row in found] == expected
    for row in found:
        dense, kept = 650 * row.iterations, 65 * row.iterations
        assert row.reached
        assert (row.up, row.down) == (dense, dense if row.method == "AGD" else kept)
    curves = rows_of(tmp_path / "contest_digits_n10_curves.csv")
    assert {(row["mu"], row["method"]) for row in curves} == {
        (mu, method) for mu in ("0.0", "0.1") for method in ("AGD", "EF21-P")
    }
    assert float(curves[-1]["gap"]) <= 1e-1 < float(curves[0]["gap"])
    assert (tmp_path / "contest_digits_n10.png").stat().st_size > 10_000


def test_the_papers_data_are_read_by_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"{'+1' if i % 3 else '-1'} {i % 7 + 1}:1 {20_000 + i}:0.5\n" for i in range(40)]
    path = tmp_path / "real-sim"
    path.write_text("".join(lines))
    words = ["--only", "contest", "--dataset", "real-sim", "--data", str(path)]
    words += ["--workers", "4", "--mu", "0.1", "--powers", "1", "2", "--budget", "3000000"]
    words += ["--gap", "1e-2", "--seeds", "1", "--methods", "2Direction", "--out", str(tmp_path)]
    run_main(monkeypatch, *words)
    assert "4 workers, K = 4191 up and 4191 down" in capsys.readouterr().out
    (row,) = outcomes.read_rows(tmp_path / "contest_real-sim_n4.csv")
    assert (row.reached, row.seed) == (True, 1)


def test_resume_runs_only_the_missing_methods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*SMALL, "--methods", "AGD", "EF21-P", "--out", str(tmp_path)]
    run_main(monkeypatch, *words)
    path = tmp_path / "contest_digits_n10.csv"
    curves = tmp_path / "contest_digits_n10_curves.csv"
    whole, whole_curves = rows_of(path), rows_of(curves)
    # An interruption between the two files: the curves of EF21-P are saved, and its rows are not.
    lines = [line for line in path.read_text().splitlines(True) if ",EF21-P," not in line]
    path.write_text("".join(lines))
    measured: list[str] = []
    run = race.run

    def recorded(setting: race.Setting, method: str, *rest: Any) -> Any:
        measured.append(method)
        return run(setting, method, *rest)

    monkeypatch.setattr(race, "run", recorded)
    run_main(monkeypatch, *words, "--resume")
    assert set(measured) == {"EF21-P"}
    stable = [{**row, "command": ""} for row in rows_of(path)]
    assert stable == [{**row, "command": ""} for row in whole]
    assert rows_of(curves) == whole_curves
    before = path.read_bytes()
    with pytest.raises(SystemExit, match=r"^error.*--resume.*n10\w*\.csv.* 2\^0 to 2\^2"):
        run_main(monkeypatch, *words, "--powers", "0", "2", "--resume")
    with pytest.raises(SystemExit, match=r"^error.*--resume.*n10\w*\.csv.* gap 0\.2"):
        run_main(monkeypatch, *words, "--gap", "0.2", "--resume")
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
        (f"--resume --only contest --k 6 --out {RESULTS}", "--resume.* K = 65.* K = 6"),
        ("--only learning", "--only.*learning"),
        ("--seeds a", "--seeds.*'a'"),
    ],
)
def test_bad_input_ends_in_one_line_before_anything_runs(
    words: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "race", lambda *_: pytest.fail("it ran"))
    monkeypatch.setattr(on_ranks, "run_ranks", lambda *_: pytest.fail("it ran"))
    monkeypatch.setattr(result_files, "write_csv", lambda *_, **__: pytest.fail("it wrote"))
    with pytest.raises(SystemExit, match=rf"^error[^\n]*:[^\n]*({problem})[^\n]*$"):
        run_main(monkeypatch, *words.split())


@pytest.mark.parametrize(
    "damage", ["", ",1,1", ",0,65,65,0,0.1,AGD,a,1,True,9,0,9,9,9,9,command,versions,date"]
)
def test_a_damaged_row_is_refused_before_anything_runs(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*SMALL, "--methods", "AGD", "--out", str(tmp_path)]
    run_main(monkeypatch, *words)
    path = tmp_path / "contest_digits_n10.csv"
    before = path.read_text() + f"10{damage}\n"
    path.write_text(before)
    monkeypatch.setattr(experiment, "race", lambda *_: pytest.fail("it ran"))
    with pytest.raises(SystemExit, match=r"^error[^\n]*n10\.csv[^\n]*row[^\n]*$"):
        run_main(monkeypatch, *words, "--resume")
    assert path.read_text() == before


def test_quick_and_unpublished_settings_do_not_write_to_the_committed_results() -> None:
    assert experiment.parse([]).out == RESULTS
    assert experiment.parse(["--mu", "1e-2", "--workers", "100"]).out == RESULTS
    assert experiment.parse(["--quick"]).out == Path("runs/two_direction-quick")
    for words in (["--seeds", "1"], ["--gap", "1e-3"], ["--powers", "0", "1"]):
        assert experiment.parse(words).out == Path("runs/two_direction")


def test_flags_that_are_named_win_over_the_quick_ones() -> None:
    quick = experiment.parse(["--quick", "--gap", "1e-3", "--mu", "0", "0", "--only", "ranks"])
    assert (quick.gap, quick.seeds, quick.mu, quick.only) == (1e-3, (0, 1), [0.0], ["ranks"])


def test_a_price_changes_the_coin_only_where_the_downlink_is_dear() -> None:
    assert [sweeps.chance(Messages(65, 65), r) for r in sweeps.PRICES] == [None] * 6
    cheap, dear = sweeps.chance(Messages(65, 7), 0.5), sweeps.chance(Messages(65, 7), 1.0)
    assert cheap is None
    assert dear is not None
    assert dear.p == pytest.approx(7 / 650)
    # Every probability of the picture is run, once.
    run = [
        (setting.sent.k_down, setting.sent.chance)
        for setting, methods in sweeps.downlink_races()
        if "2Direction" in methods
    ]
    needed = {
        (k, sweeps.chance(Messages(sweeps.K_UP, k), r))
        for k in sweeps.PRICED_K_DOWNS
        for r in sweeps.PRICES
    }
    assert len(run) == len(set(run))
    assert set(run) == needed | {(k, None) for k in sweeps.K_DOWNS}


def made_row(method: str, seed: int = 0, up: int = 0, down: int = 0, **changes: Any) -> race.Row:
    row = race.Row(10, 0.0, 65, 65, 0.0, 1e-3, method, 0, seed, True, 1, 0.0, up, down, 0, 0)
    return replace(row, **changes)


def test_the_cheapest_method_depends_on_the_price() -> None:
    rows = [made_row("2Direction", up=20, down=60), made_row("AGD", up=50, down=50)]
    failed = made_row("EF21", seed=1000, up=1, reached=False)
    for r, best in ((0.0, "2Direction"), (1.0, "AGD")):
        ranked = outcomes.cheapest(
            [*rows, failed], ("EF21", "AGD", "2Direction"), outcomes.priced(r)
        )
        assert ranked[0][0] == best
        assert len(ranked) == 2
    assert outcomes.over_seeds([failed], outcomes.coordinates) is None


def test_a_ratio_is_paired_by_seed_and_needs_all_runs() -> None:
    ours = [made_row("2Direction", seed, up=10 * (seed + 1)) for seed in range(3)]
    close = [made_row("AGD", seed, up=up) for seed, up in enumerate((11, 19, 30))]
    apart = [made_row("AGD", seed, up=20 * (seed + 1)) for seed in range(3)]
    same = outcomes.ratio(close, ours, outcomes.coordinates)
    twice = outcomes.ratio(apart, ours, outcomes.coordinates)
    assert same is not None
    assert twice is not None
    assert (same.mean, same.count) == pytest.approx(((1.1 + 0.95 + 1) / 3, 3))
    assert (twice.mean, twice.deviation) == pytest.approx((2, 0))
    assert outcomes.tie(same)
    assert not outcomes.tie(twice)
    failed = [*close[:2], replace(close[2], reached=False)]
    assert outcomes.ratio(failed, ours, outcomes.coordinates) is None


def test_an_exponent_has_a_deviation_over_the_seeds() -> None:
    sweep = scaling.sweeps()[0]
    rows = [
        made_row("AGD", seed, iterations=round(1000 * factor * point.kappa**0.5))
        for seed, factor in ((0, 1), (3, 2))
        for point in sweep.points
    ]
    shared = [point.setting.shared for point in sweep.points] * 2
    fields = ("n", "mu", "k_up", "k_down", "p", "gap")
    rows = [
        replace(row, **dict(zip(fields, own, strict=True)))
        for row, own in zip(rows, shared, strict=True)
    ]
    found = scaling.exponent(sweep, "AGD", [*rows, replace(rows[0], seed=9)])
    assert (found.measured.mean, found.theory) == pytest.approx((0.5, 0.5), abs=1e-3)
    assert (found.measured.count, found.measured.deviation) == pytest.approx((2, 0), abs=1e-3)


def test_all_methods_of_a_sweep_have_the_same_points() -> None:
    for setting, methods in scaling.scaling_races():
        assert set(methods) >= {"2Direction", "EF21-P + DIANA"}
        assert setting.budget > 10**8


# --- The committed results ------------------------------------------------------------------------


def committed(name: str) -> list[race.Row]:
    return outcomes.read_rows(RESULTS / f"{name}.csv")


@pytest.mark.parametrize(("mu", "method"), tables.REFERENCE)
def test_our_results_are_those_of_other_programs(mu: float, method: str) -> None:
    ours = outcomes.over_seeds(
        outcomes.select(committed("contest_digits_n10"), method, mu=mu), outcomes.coordinates
    )
    assert ours is not None
    assert ours.count == 5
    # Step sizes are powers of 2, and a noisy method can reach the gap sooner or later.
    assert ours.mean == pytest.approx(tables.REFERENCE[mu, method], rel=0.15)


@pytest.mark.parametrize(
    "name", ["winners", *thorough(["contest_digits_n100", "alpha", "scaling"])]
)
def test_pictures_are_drawn_from_the_committed_rows(name: str, tmp_path: Path) -> None:
    for path in RESULTS.glob(f"{name}*.csv"):
        shutil.copy(path, tmp_path)
    draw = {"alpha": pictures.draw_downlink, "contest_digits_n100": pictures.draw_contest}
    draw |= {"scaling": pictures.draw_scaling, "winners": pictures.draw_winners}
    draw[name](tmp_path / f"{name}.csv")
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000


@pytest.mark.parametrize("n", contest.WORKERS)
def test_every_method_was_run_with_every_mu(n: int) -> None:
    rows = committed(f"contest_digits_n{n}")
    for mu in contest.MUS:
        for method in METHODS:
            own = outcomes.select(rows, method, mu=mu)
            seeds = [row.seed for row in own]
            assert seeds == [0, 1, 2, 3, 4] or (seeds == [1000] and not own[0].reached)


@pytest.mark.parametrize("name", ["contest_digits_n10", "contest_digits_n100", "alpha"])
def test_no_best_step_is_at_an_end_of_the_grid(name: str) -> None:
    rows = committed(name)
    missed = {(row.method, row.mu) for row in rows if not row.reached}
    for row in rows:
        grid = sweeps.POWERS if name == "alpha" else contest.powers(row.mu)
        limit = row.method in ACCELERATED and 2.0 ** (row.power + 1) * row.mu > 1
        inside = grid[0] < row.power < grid[-1]
        # The page gives no figure for a method that missed the gap with some seeds.
        assert inside or limit or (row.method, row.mu) in missed


@pytest.mark.parametrize("method", ["2Direction", "AGD", "EF21-P + DIANA"])
def test_the_committed_results_are_this_codes(method: str) -> None:
    (row,) = outcomes.select(committed("contest_digits_n10"), method, mu=1e-2, seed=0)
    digits = data_sets.digits()
    setting = contest.setting(digits, 10, 1e-2, contest.tenth(digits))
    again = race.run(setting, method, row.power, 0)
    assert again.reached
    # Machines add in different orders, so a run can end some iterations sooner or later.
    assert again.method.iterations == pytest.approx(row.iterations, rel=0.02)
    assert again.cost == pytest.approx(row.total, rel=0.02)


@pytest.mark.parametrize("method", ["2Direction", "AGD", "EF21-P + DIANA"])
def test_iterations_grow_with_the_condition_number_as_in_theory(method: str) -> None:
    found = scaling.exponent(scaling.sweeps()[0], method, committed("scaling"))
    assert found.measured.count == 5
    assert found.measured.mean == pytest.approx(found.theory, abs=0.15)


# --- Real ranks -----------------------------------------------------------------------------------


def test_the_table_of_ranks_is_of_one_seed_that_reaches_the_gap(tmp_path: Path) -> None:
    setting = on_ranks.setting(gap=0.5, seed=3)
    first, other = (on_ranks.run_method("AGD", setting, Simulated(4, seed)) for seed in (3, 0))
    assert first.x != other.x
    on_ranks.open_table(setting, tmp_path, 3, resume=False).save()
    with pytest.raises(RecipeError, match=r"seed 3.* seed 0"):
        on_ranks.open_table(setting, tmp_path, 0, resume=True)
    with pytest.raises(RecipeError, match=r"AGD .*seed 3"):
        on_ranks.run_method("AGD", replace(setting, budget=10), Simulated(4, 3))


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
    found = sorted(path.name for path in tmp_path.glob("*.csv"))
    contests = ["contest_digits_n10.csv", "contest_digits_n10_curves.csv"]
    assert found == [
        "alpha.csv",
        *contests,
        "on_ranks.csv",
        "scaling.csv",
        "winners.csv",
    ]
    assert [row["method"] for row in rows_of(tmp_path / "on_ranks.csv")] == list(on_ranks.POWERS)
    before = {name: (tmp_path / name).read_bytes() for name in found}
    run_main(monkeypatch, *words, "--resume")
    assert {name: (tmp_path / name).read_bytes() for name in found} == before


def test_the_committed_run_on_ranks_has_every_method() -> None:
    rows = rows_of(RESULTS / "on_ranks.csv")
    assert [row["method"] for row in rows] == list(on_ranks.POWERS)
    for row in rows:
        assert int(row["received_by_rank"]) == 3 * int(row["bytes_up"])
