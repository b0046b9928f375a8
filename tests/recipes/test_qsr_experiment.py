"""The comparison of schedules: ranks, counts, grids, files, resuming, and bad input."""

import argparse
import csv
import functools
import math
import re
import shutil
import statistics
import sys
import threading
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recipes import result_files
from recipes.errors import RecipeError
from recipes.image_data.sources import digits
from recipes.page_tables import tables_of
from recipes.qsr import comparison, experiment, figures, launch, ledger, real_ranks, results, task
from recipes.qsr.real_ranks import train_on_ranks
from recipes.qsr.settings import ALL_DECAYS, METHODS, PARTS, Setting, Study
from recipes.qsr.simulated_ranks import train_simulated
from recipes.qsr.training import Outcome, Point
from tests.recipes.forked_ranks import RECIPES
from tests.support.ranks import on_threads
from torchcomp.schedules import Horizon

FOLDER = RECIPES / "qsr"

NUMEL = 64 * 128 + 128 + 128 * 128 + 128 + 128 * 10 + 10
STEPS_PER_EPOCH = 11
SHORT = Setting(ranks=2, epochs=2)
SMALL_GRID = replace(comparison.QUICK_GRID, periods=(2, 4), seeds=2)
QSR = Point("QSR", "qsr(alpha=0.1, h_base=2)", 0.1, 5e-4)


@pytest.fixture(scope="module")
def digits_task() -> task.Task:
    return task.open_task("digits", None, 0.2)


@pytest.fixture(scope="module", autouse=True)
def _one_model_at_a_time() -> Iterator[None]:
    # Threads share torch's global random generator, from which the weights are drawn.
    build, lock = task.Task.build, threading.Lock()

    def alone(opened: Any, *args: Any) -> nn.Module:
        with lock:
            return build(opened, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task.Task, "build", alone)
        yield


# --- The rules, as the paper defines them ---------------------------------------------------------


@functools.cache
def counted(schedule: str, peak: float, setting: Setting) -> int:
    """Count the synchronisations of a run, round by round."""
    name, *words = re.findall(r"[a-z_]+|[\d.]+", schedule)
    numbers = [float(word) for word in words if word[0].isdigit()]
    warmup = max(1, setting.epochs // 20) * STEPS_PER_EPOCH
    total = setting.epochs * STEPS_PER_EPOCH
    syncs = step = 0
    while step < total:
        eta = lr_at(step, peak, total, warmup, setting.decay)
        step += min(period(name, numbers, eta, step, warmup), total)
        syncs += 1
    return syncs


def lr_at(step: int, peak: float, total: int, warmup: int, decay: str) -> float:
    if step < warmup:
        return 1e-6 + (peak - 1e-6) * step / warmup
    if decay == "step":
        return peak * (1 if step < total / 2 else 0.1 if step < 3 * total / 4 else 0.01)
    done = (step - warmup) / (total - warmup)
    if decay == "linear":
        return 1e-6 + (peak - 1e-6) * (1 - done)
    cosine = 1e-6 + (peak - 1e-6) * 0.5 * (1 + math.cos(math.pi * done))
    return 2.0 ** round(math.log2(cosine)) if decay == "step-cosine" else cosine


def period(name: str, numbers: list[float], eta: float, step: int, warmup: int) -> int:
    if name in ("parallel", "every"):
        return int(numbers[0]) if numbers else 1
    if name in ("post_local", "swap"):
        after = int(numbers[1]) if name == "post_local" else 10**9
        return 1 if step < numbers[0] else after
    coefficient, exponent, base = numbers if name == "power" else (numbers[0], 2, numbers[1])
    return int(base if step < warmup else max(base, (coefficient / eta) ** exponent // 1))


def test_the_counts_by_hand() -> None:
    setting = Setting(epochs=2)  # 22 steps, 11 of warm-up
    assert counted("post_local(switch=10, h=4)", 0.1, setting) == 10 + 3
    assert counted("swap(switch=10)", 0.1, setting) == 10 + 1
    # Six rounds of two steps in warm-up, the last of them longer than it, then H = 25 to the end.
    assert counted("qsr(alpha=0.5, h_base=2)", 0.1, setting) == 7


# --- Simulated ranks and real ones ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "model", "optimizer", "decay", "schedule"),
    [
        (2, "mlp", "adamw", "cosine", "parallel"),
        (4, "mlp", "sgd", "cosine", "parallel"),
        (4, "mlp", "sgd", "step", "qsr(alpha=0.1, h_base=2)"),
        (4, "mlp", "adamw", "linear", "swap(switch=12)"),
        (2, "vit", "adamw", "cosine", "every(3)"),
    ],
)
def test_simulated_ranks_do_what_ddp_and_local_sgd_do(
    ranks: int, model: str, optimizer: str, decay: str, schedule: str, digits_task: task.Task
) -> None:
    setting = Setting(model=model, optimizer=optimizer, decay=decay, ranks=ranks, epochs=2)
    point = Point("any", schedule, 0.1 if optimizer == "sgd" else 0.003, 5e-4)
    chosen: dict[str, Any] = {"seeds": (3, 5), "part": "test", "curve": True}
    real = on_threads(ranks, lambda: train_on_ranks(digits_task, setting, point, **chosen))
    assert all(each == real[0] for each in real)
    # Accuracy, loss, curve, synchronisations and bytes.
    assert train_simulated(digits_task, setting, point, **chosen) == real[0]


@pytest.mark.parametrize("model", ["mlp", "vit"])
def test_seeds_side_by_side_do_not_change_each_other(model: str, digits_task: task.Task) -> None:
    setting = replace(SHORT, model=model)
    both = train_simulated(digits_task, setting, QSR, seeds=(3, 5), part="test", curve=False)
    for seed, outcome in zip((3, 5), both, strict=True):
        (alone,) = train_simulated(
            digits_task, setting, QSR, seeds=[seed], part="test", curve=False
        )
        assert outcome.loss == pytest.approx(alone.loss, abs=2e-4)
        assert (outcome.syncs, outcome.nbytes) == (alone.syncs, alone.nbytes)
    assert both[0].loss != both[1].loss


def test_a_run_that_diverges_gets_the_worst_score(digits_task: task.Task) -> None:
    point = Point("constant H", "every(4)", 1e30, 0.0)
    chosen: dict[str, Any] = {"seeds": (0, 1), "part": "validation", "curve": False}
    simulated = train_simulated(digits_task, SHORT, point, **chosen)
    real = on_threads(2, lambda: train_on_ranks(digits_task, SHORT, point, **chosen))[0]
    for outcome in (*simulated, *real):
        assert (outcome.accuracy, outcome.loss) == (0, math.inf)


# --- The experiment -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> argparse.Namespace:
    """Run two small studies: all methods with map and curves, and the decay in steps."""
    arguments = experiment.parse(["--quick", "--out", str(tmp_path_factory.mktemp("qsr"))])
    arguments.grid = SMALL_GRID
    studies = (
        Study(SHORT, METHODS, curves=True, map=True),
        Study(replace(SHORT, decay="step")),
    )
    arguments.parts = {"own": studies}
    run(arguments)
    return arguments


def run(arguments: argparse.Namespace, *, resume: bool = False) -> None:
    tables = ledger.open_tables(arguments.out, "own", resume=resume)
    launch.run_studies(arguments.parts["own"], arguments, tables)


def rows(path: Path) -> list[dict[str, str]]:
    lines = path.read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def test_every_count_is_exact(finished: argparse.Namespace) -> None:
    runs = ledger.read_outcomes(rows(finished.out / "own.csv"))
    for each, outcome in runs.items():
        syncs = counted(each.point.schedule, each.point.lr, each.setting)
        assert outcome.syncs == syncs, each
        # In an all-reduce, each of two ranks sends half of the model twice.
        assert outcome.nbytes == syncs * NUMEL * 4


def test_each_method_is_reported_at_its_best_point(finished: argparse.Namespace) -> None:
    found = results.read_results(finished.out)
    for method in METHODS:
        entry = found.reported(SHORT, method)
        assert entry is not None
        assert sorted(entry.outcomes) == [0, 1]
        tried = {each.point: each for each in found.tried(SHORT, method)}
        # QSR was also tried on the map, which chooses nothing.
        points = SMALL_GRID.parallel("sgd")
        if method != "parallel":
            points = SMALL_GRID.local(method, "sgd", peak=0.1, horizon=Horizon(22, 11))
        best = tried[entry.point].accuracy.mean
        assert all(best >= tried[point].accuracy.mean for point in points)
        # Tuning and reporting share no seed.
        assert all(not {*other.outcomes} & {*entry.outcomes} for other in tried.values())


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_every_method_has_as_many_points_as_parallel_training(optimizer: str) -> None:
    grid = comparison.Grid()
    count = len(set(grid.parallel(optimizer)))
    assert count == 9
    for method in METHODS[1:]:
        points = grid.local(method, optimizer, peak=0.1, horizon=Horizon(1320, 66))
        assert len(set(points)) == count, method


def test_the_accuracy_is_measured_during_the_run(finished: argparse.Namespace) -> None:
    found = results.read_results(finished.out)
    curves = {each.method: points for each, points in found.curves.items() if each.seed == 1}
    assert set(curves) == set(METHODS)
    for method, points in curves.items():
        entry = found.reported(SHORT, method)
        assert entry is not None
        assert len(points) == 16
        # The last point is the reported accuracy.
        assert points[22] == entry.outcomes[1].accuracy


def test_tables_and_pictures_are_made_from_the_files(finished: argparse.Namespace) -> None:
    figures.draw_all(finished.out, 360)
    for name in ("schedules", "accuracy", "curves", "maps", "differences"):
        assert (finished.out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    found = results.read_results(finished.out)
    qsr, parallel = (found.reported(SHORT, method) for method in ("QSR", "parallel"))
    assert qsr is not None
    assert parallel is not None
    table = tables_of("qsr")["sgd_mlp"]
    assert table(finished.out).count("\n") == 1  # Other settings: a header without rows.
    made = functools.partial(table.func, setting=SHORT)(finished.out)
    line = next(line for line in made.splitlines() if line.startswith("| QSR"))
    for text in (qsr.point.schedule, qsr.accuracy.with_deviation(), f"{qsr.syncs}"):
        assert text in line
    assert qsr.ahead_of(parallel).with_error() in line


def test_a_picture_without_parallel_training_has_the_share_of_the_steps(
    finished: argparse.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (finished.out / "own.csv").read_text().splitlines()
    kept = [line for line in whole if not re.search(r",(parallel|constant H),.*,test,", line)]
    (tmp_path / "own.csv").write_text("\n".join(kept))
    shutil.copy(finished.out / "own_curves.csv", tmp_path)
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(
        figures, "save_figure", lambda figure, path: drawn.update({path.stem: figure})
    )
    figures.draw_all(tmp_path, 360)
    assert "differences" not in drawn
    axes = drawn["accuracy"].axes[0]
    shares = {box.get_label(): box[0].get_xdata()[0] for box in axes.containers}
    swap = results.read_results(tmp_path).reported(SHORT, "SWAP")
    assert swap is not None
    assert shares["SWAP"] == pytest.approx(100 * swap.syncs / 22)


def test_verdicts_count_differences_of_two_standard_errors() -> None:
    by_setting: dict[tuple[str, ...], dict[str, dict[str, float]]] = {}
    for part in PARTS:
        for row in rows(FOLDER / "results" / f"{part}.csv"):
            if row["part"] == "test":
                setting = tuple(row[field.name] for field in fields(Setting))
                method = by_setting.setdefault(setting, {}).setdefault(row["method"], {})
                method[row["seed"]] = float(row["accuracy"])
    lines = tables_of("qsr")["verdicts"](FOLDER / "results").splitlines()[2:]
    assert len(by_setting) == 11
    for line, name in zip(lines, ("parallel", "constant H"), strict=True):
        counts = {"ahead": 0, "no difference": 0, "behind": 0}
        for found in by_setting.values():
            gaps = [found["QSR"][seed] - other for seed, other in found[name].items()]
            errors = statistics.fmean(gaps) / statistics.stdev(gaps) * math.sqrt(len(gaps))
            side = "ahead" if errors >= 2 else "behind" if errors <= -2 else "no difference"
            counts[side] += 1
        assert line == f"| {name} | {' | '.join(f'{each} of 11' for each in counts.values())} |"


def test_tuned_values_at_an_end_of_the_grid_are_marked() -> None:
    table = tables_of("qsr")["tuned"](FOLDER / "results")
    (row,) = (line for line in table.splitlines() if line.startswith("| vit"))
    cells = [cell.strip() for cell in row.split("|")]
    # The grids: 0.001, 0.003, 0.01; 0.1, 0.5, 2; and 2, 4, 8.
    assert cells[7:10] == ["0.003", "0.5, 0.1†, 0.1†", "`every(2)`†"]


def test_the_rounds_of_a_schedule() -> None:
    entry = results.Entry(
        Setting(epochs=2),
        Point("cubic", "power(coef=0.2, exponent=3, h_base=2)", 0.1, 0.0),
        {0: Outcome(0.0, 0.0, 0, 0)},
    )
    starts, lengths = figures.rounds(entry, 360)
    assert (starts[0], starts[-1], sum(lengths[:-1])) == (0, 22, 22)
    assert lengths[:3] == [2, 2, 2]


def test_resume_trains_only_the_missing_seeds(
    finished: argparse.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (finished.out / "own.csv").read_text().splitlines()
    lost = [line for line in whole if ",parallel," in line and ",1,test," in line]
    (tmp_path / "own.csv").write_text("\n".join(each for each in whole if each not in lost))
    trained: list[tuple[str, Any]] = []

    def recorded(*args: Any, seeds: Any, **options: Any) -> list[Outcome]:
        trained.append((args[2].schedule, seeds))
        return train_simulated(*args, seeds=seeds, **options)

    monkeypatch.setattr(launch, "train_simulated", recorded)
    arguments = argparse.Namespace(**{**vars(finished), "out": tmp_path})
    run(arguments, resume=True)
    assert trained == [("parallel", [1])] * len(lost)
    assert len(lost) == 2
    assert ledger.read_outcomes(rows(tmp_path / "own.csv")) == pytest.approx(
        ledger.read_outcomes(rows(finished.out / "own.csv"))
    )


def test_runs_of_two_grids_are_not_mixed(finished: argparse.Namespace, tmp_path: Path) -> None:
    text = (finished.out / "own.csv").read_text()
    # One of the two seeds ran with another H.
    chosen = re.findall(r"every\((\d)\),0.1,0.0005,1,test", text)[0]
    other = "every(9),0.1,0.0005,1,test"
    (tmp_path / "own.csv").write_text(text.replace(f"every({chosen}),0.1,0.0005,1,test", other))
    with pytest.raises(RecipeError, match=r"constant H.*2 points"):
        results.read_results(tmp_path).reported(SHORT, "constant H")


@pytest.mark.thorough
def test_the_command_starts_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--epochs", "2", "--seeds", "7", "--ranks", "2", "--methods", "SWAP", "--quick"]
    words += ["--processes", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["recipes/qsr/experiment.py", *words])
    experiment.main()
    assert "swap(switch=" in capsys.readouterr().out
    (entry,) = [
        each
        for (_, _, part), each in results.read_results(tmp_path).entries.items()
        if part == "test"
    ]
    assert (entry.point.method, [*entry.outcomes], entry.setting.ranks) == ("SWAP", [7], 2)
    before = (tmp_path / "own.csv").read_bytes()
    monkeypatch.setattr(sys, "argv", ["recipes/qsr/experiment.py", *words, "--resume"])
    experiment.main()
    assert (tmp_path / "own.csv").read_bytes() == before


@pytest.mark.parametrize("part", PARTS)
def test_the_published_results_are_whole_and_their_counts_exact(part: str) -> None:
    folder = FOLDER / "results"
    runs = ledger.read_outcomes(rows(folder / f"{part}.csv"))
    for each, outcome in runs.items():
        syncs = counted(each.point.schedule, each.point.lr, each.setting)
        assert outcome.syncs == syncs, each
    found = results.read_results(folder)
    for study in PARTS[part]:
        for method in study.methods:
            entry = found.reported(study.setting, method)
            assert entry is not None
            assert sorted(entry.outcomes) == list(range(12))
            if study.setting.model == "mlp":
                # Each of K ranks sends 2 (K - 1) / K of the model.
                sent = NUMEL * 4 * 2 * (study.setting.ranks - 1) // study.setting.ranks
                assert entry.nbytes == pytest.approx(entry.syncs * sent, rel=1e-4)


# --- CIFAR-10 by path -----------------------------------------------------------------------------


def test_cifar10_is_read_from_its_archive(
    cifar_archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real_ranks, "BN_IMAGES", 20)
    opened = task.open_task("cifar10", cifar_archive, 0.0)
    for part, count in (("validation", 10), ("test", 20)):
        train, evaluated = opened.draw(0, part)
        assert (len(train.labels), len(evaluated.labels)) == (90, count)
    setting = Setting("cifar10", 0.0, "cnn", ranks=2, batch=10, epochs=2)
    point = Point("constant H", "every(4)", 0.1, 5e-4)
    found = on_threads(
        2,
        lambda: train_on_ranks(opened, setting, point, seeds=(0, 1), part="test", curve=False),
    )
    assert [each.syncs for each in found[0]] == [5, 5]
    # Weights and re-estimated statistics are equal on both ranks.
    assert found[0] == found[1]


# --- Data and bad input ---------------------------------------------------------------------------


def test_tuning_and_reporting_share_no_image(digits_task: task.Task) -> None:
    whole = torch.cat([torch.from_numpy(split.images) for split in digits().values()])
    halves = []
    for part in ("validation", "test"):
        train, evaluated = digits_task.draw(3, part)
        assert (len(train.images), len(train.labels)) == (360, 360)
        halves.append(torch.cat([train.images, evaluated.images]))
    # Some digits are in the data set twice.
    images = torch.cat(halves)
    assert len(images) == len(whole)
    assert torch.equal(*(torch.sort(each.flatten(1).sum(1)).values for each in (images, whole)))


def test_a_seed_draws_its_images_and_its_wrong_labels(digits_task: task.Task) -> None:
    clean_task = task.open_task("digits", None, 0.0)
    (noisy, evaluated), (other, _) = (digits_task.draw(seed, "test") for seed in (3, 4))
    clean, same = clean_task.draw(3, "test")
    assert torch.equal(noisy.images, clean.images)
    assert not torch.equal(noisy.images, other.images)
    assert torch.equal(evaluated.labels, same.labels)
    # A tenth of the replaced labels are right again.
    assert 0.12 < float((noisy.labels != clean.labels).float().mean()) < 0.24
    again, _ = digits_task.draw(3, "test")
    assert torch.equal(again.labels, noisy.labels)


@pytest.mark.parametrize("decay", ALL_DECAYS)
def test_the_learning_rates_are_the_papers(decay: str) -> None:
    setting = Setting(decay=decay, epochs=40)
    lr = setting.lr_function(0.1, 360)
    assert [lr(step) for step in range(440)] == pytest.approx(
        [lr_at(step, 0.1, 440, 22, decay) for step in range(440)]
    )


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--dataset", "cifar10"], "--data.*cifar10"),
        (["--data", "nowhere"], "--data nowhere.*digits"),
        (["--out", __file__], "--out .*test_qsr_experiment.py"),
        (["--quick", "--out", str(FOLDER / "results")], "--quick.*--out .*results"),
        (["--ranks", "3"], "--ranks 3.* 32 "),
        (["--batch", "30"], "--ranks 4.* 30 "),
        (["--batch", "512"], "512"),
        (["--epochs", "1"], "--epochs 1.* 2"),
        (["--label-noise", "1.5"], r"--label-noise.*1\.5"),
        (["--model", "cnn"], "--model cnn.*mlp or vit.*digits"),
        (["--optimizer", "lion"], "--optimizer.*lion"),
        (["--decay", "cubic"], "--decay.*cubic"),
        (["--seeds", "-1"], "--seeds.*-1"),
        (["--methods", "SGD"], "--methods.*SGD"),
        (["--only", "lengths", "--decay", "linear"], "--only.*--decay"),
    ],
)
def test_bad_input_ends_in_one_line_before_anything_starts(
    words: list[str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["experiment.py", *words])
    monkeypatch.setattr(experiment, "run_studies", lambda *_: pytest.fail("it ran"))
    monkeypatch.setattr(result_files, "write_csv", lambda *_, **__: pytest.fail("it wrote"))
    with pytest.raises(SystemExit, match=rf"^error[^\n]*: [^\n]*{problem}[^\n]*$"):
        experiment.main()


@pytest.mark.parametrize(
    "words", [["--seeds", "1"], ["--decay", "linear"], ["--methods", "QSR"], ["--processes"]]
)
def test_unpublished_settings_do_not_write_to_the_committed_results(words: list[str]) -> None:
    assert experiment.parse([]).out == FOLDER / "results"
    assert experiment.parse(["--only", "decays"]).out == FOLDER / "results"
    assert experiment.parse(["--quick"]).out == Path("runs/qsr-quick")
    assert experiment.parse(words).out == Path("runs/qsr")


def test_the_flags_describe_one_study() -> None:
    words = ["--optimizer", "adamw", "--decay", "step", "--ranks", "2", "--epochs", "9"]
    parsed = experiment.parse([*words, "--methods", "SWAP", "QSR", "SWAP"])
    (studies,) = parsed.parts.values()
    # A method that is named twice runs once.
    assert studies == (
        Study(
            Setting(optimizer="adamw", decay="step", ranks=2, epochs=9),
            ("SWAP", "QSR"),
            curves=True,
        ),
    )
    assert not parsed.processes
    # BatchNorm needs ranks of its own.
    assert experiment.parse(["--dataset", "cifar10"]).processes


def test_results_of_another_version_are_refused(tmp_path: Path) -> None:
    (tmp_path / "decays.csv").write_text("# task: older\nmethod,accuracy\nQSR,90\n")
    with pytest.raises(RecipeError, match=r"decays.*dataset.*--out"):
        results.read_results(tmp_path)


def test_resume_refuses_a_file_with_other_columns(tmp_path: Path) -> None:
    ledger.open_tables(tmp_path, "own", resume=False).runs.save()
    path = tmp_path / "own.csv"
    notes = [line for line in path.read_text().splitlines() if line.startswith("#")]
    path.write_text("\n".join([*notes, "method,accuracy", "QSR,90", ""]))
    with pytest.raises(RecipeError, match=r"--resume.*own.csv.*method, accuracy.*dataset, label_n"):
        ledger.open_tables(tmp_path, "own", resume=True)


def test_a_damaged_file_of_another_part_is_noticed_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "decays.csv").write_text("# task: older\nmethod,accuracy\nQSR,90\n")
    words = ["--quick", "--only", "workers", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["experiment.py", *words])
    monkeypatch.setattr(experiment, "run_studies", lambda *_: pytest.fail("it ran"))
    with pytest.raises(SystemExit, match=r"^error: .*decays.*dataset.*--out"):
        experiment.main()
    assert [path.name for path in tmp_path.iterdir()] == ["decays.csv"]


def test_a_damaged_row_is_noticed_before_training(
    finished: argparse.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (finished.out / "own.csv").read_text()
    (tmp_path / "own.csv").write_text(re.sub(r",validation,[\d.]+,", ",validation,much,", text))
    words = ["--quick", "--decay", "step", "--resume", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["experiment.py", *words])
    monkeypatch.setattr(experiment, "run_studies", lambda *_: pytest.fail("it ran"))
    with pytest.raises(SystemExit, match=r"^error: .*own.*damaged.*'much'.*--out"):
        experiment.main()
