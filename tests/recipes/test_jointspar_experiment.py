"""The experiments on JointSpar: the paper's configurations, runs on two ranks, and the tables."""

import gzip
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from recipes.errors import RecipeError
from recipes.experiments import PROVENANCE, ResultTable
from recipes.image_data import public_sets
from recipes.jointspar import (
    backward,
    bandit,
    convergence,
    convergence_drawing,
    convergence_summary,
    drawing,
    experiment,
    image_sets,
    large_batch,
    layer_training,
    networks,
    paper,
    paper_data,
    run_table,
    selection,
    tables,
    wall_clock,
)
from recipes.jointspar.experiment import PARTS
from recipes.jointspar.layer_training import Hyperparameters, Outcome
from recipes.jointspar.methods import Dense, LayerSampling, TopK
from recipes.jointspar.paper_setting import Setting
from recipes.jointspar.parts import SEEDS
from recipes.jointspar.run_table import TABLE, Contender, PlannedRun, TrainingRun
from recipes.options import read_options
from recipes.result_files import read_csv
from recipes.settings import Settings
from recipes.spread import spread
from tests.support.patience import PATIENCE
from tests.support.ranks import on_threads
from torchcomp.jointspar import Baseline, Literal

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes" / "jointspar"

CONFIGS = sorted((FOLDER / "configs").glob("*.yaml"))
SIX = {"mnist", "fashion-mnist", "svhn", "cifar10", "cifar100", "imagenet"}


def setting_of(*words: str) -> Setting:
    return read_options(Setting, list(words))


# --- The paper's configurations -------------------------------------------------------------------


def test_there_is_a_configuration_for_each_data_set_of_the_paper() -> None:
    assert {setting_of("--config", str(path)).dataset for path in CONFIGS} == SIX
    assert len(CONFIGS) == len(SIX)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configurations_are_the_papers_and_dry_run(path: Path) -> None:
    setting = setting_of("--config", str(path))
    sizes = image_sets.SIZES[setting.dataset]
    per_epoch = sizes.train_images // (16 * 1024)
    hyperparameters = setting.hyperparameters(per_epoch, workers=16)
    # Warm-up over 5 of 90 epochs to 16 times the lr of one worker; a tenth at 30, 50 and 70.
    assert hyperparameters.steps == 90 * per_epoch
    epochs = (4, 5, 29, 30, 49, 50, 69, 70, 89)
    lrs = [hyperparameters.lr_at(epoch * per_epoch + per_epoch - 1) for epoch in epochs]
    tenths = (0, 0, 0, 1, 1, 2, 2, 3, 3)
    assert lrs == pytest.approx([1.6 * 0.1**tenth for tenth in tenths])
    assert hyperparameters.lr_at(0) == pytest.approx(1.6 / (5 * per_epoch))
    text = paper.describe(setting, 16)
    assert f"{sizes.train_images:,} to train" in text
    assert "16 workers x 1024" in text
    assert f"{90 * per_epoch:,} (90 epochs of {per_epoch})" in text
    assert setting.exchange == LayerSampling(0.6, "layers", "shared")
    assert setting.optimizer == "lars"


@pytest.mark.thorough
def test_a_dry_run_from_the_command_line() -> None:
    command = [sys.executable, "-m", "recipes.jointspar.paper", "--dry-run", "--workers", "4"]
    command += ["--config", str(FOLDER / "configs" / "cifar10.yaml"), "--method", "topk(0.4)"]
    printed = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, check=True
    ).stdout
    assert "method: topk(0.4)" in printed
    # 21 layers, and a 3x3 stem: 11,173,962 weights around a ring of 4.
    assert re.search(r"layers +21: conv1", printed)
    assert f"{11_173_962 * 4 * 3 // 2:,} dense" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dataset", "cifar11"], "--dataset .*'cifar11'.* cifar10"),
        (["--method", "joint"], "'joint'.*did you mean 'jointspar'"),
        (["--optimizer", "adam"], "--optimizer .*'adam'.* sgd, lars"),
        (["--method", 'jointspar(0.6, selection="per-rank")'], "lars .*per-rank.*lars-own or sgd"),
        (["--epochs", "0"], "--epochs .* 1.* 0"),
        (["--warmup-epochs", "90"], "--warmup-epochs .*--epochs 90.* 90"),
        (["--drops", "50,30"], "--drops .*50,.*30.* 1 .* 89.* 90"),
        (["--lr", "nan"], "--lr.*'nan'"),
        (["--method", "jointspar(5)"], "budget .* 1.* 5"),
        (["--momentum", "2"], "--momentum .* 1.* 2.0"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_bad_settings_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        setting_of(*words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("metod: dense", "'metod' .*bad.yaml.*method"),
        ("epochs: 0.5", "epochs.* 0.5"),
        ("drops: 30", "drops.* 30,60,80.* 30"),
        ("- 1", "bad.yaml.*key: value"),
        ("dataset: [", "bad.yaml.*YAML"),
    ],
)
def test_bad_configuration_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message):
        setting_of("--config", str(path))


def test_a_configuration_may_write_small_numbers_without_a_dot(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text("lr: 1e-3\ndrops: []\n")
    setting = setting_of("--config", str(path), "--trust", "1e-4")
    assert (setting.lr, setting.drops, setting.trust) == (1e-3, (), 1e-4)


def test_the_plan_counts_what_any_rank_sends() -> None:
    words = ["--dataset", "mnist", "--batch", "100", "--optimizer", "sgd", "--method"]
    shared = paper.describe(setting_of(*words, "jointspar(0.5)"), 2)
    per_rank = paper.describe(setting_of(*words, 'jointspar(0.5, selection="per-rank")'), 2)
    dense = int(re.search(r"([\d,]+) dense", shared)[1].replace(",", ""))
    assert f"{0.5 * dense:,.0f} at first" in shared
    assert f"{0.75 * dense:,.0f} at first" in per_rank


def test_more_workers_than_images_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"64 workers .*1024 .*60,000"):
        paper.describe(setting_of("--dataset", "mnist"), 64)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make this process the only rank, and leave the group after the test."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_the_papers_recipe_trains_on_images_in_memory(
    alone: None, cifar_archive: Path, tmp_path: Path
) -> None:
    words = ["--dataset", "cifar10", "--model", "mlp", "--batch", "50", "--epochs", "2"]
    words += ["--warmup-epochs", "1", "--drops", "1", "--shift", "4", "--mirror"]
    paper.run(setting_of(*words, "--data", str(cifar_archive), "--out", str(tmp_path / "out")))
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    # The first step keeps all layers. Later steps draw them.
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert len(rows[0]["kept"]) == len(rows[0]["p"]) == 22
    assert any(len(row["kept"]) < 22 for row in rows)
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["dataset"] == "cifar10"


def test_the_papers_recipe_trains_on_photographs(
    alone: None, photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = partial(Settings, loader="torchvision", image_size=32)
    monkeypatch.setattr(paper_data, "Settings", small)
    # Without loader processes: a fork of the tests' process would free what earlier tests left for
    # the garbage collector, and a process group joins threads that the fork does not have.
    monkeypatch.setattr(paper_data, "threads_per_worker", lambda *_: 0)
    words = ["--dataset", "imagenet", "--model", "torchvision/resnet18", "--batch", "4"]
    words += ["--epochs", "1", "--warmup-epochs", "0", "--drops", ""]
    paper.run(setting_of(*words, "--data", str(photo_folder), "--out", str(tmp_path / "out")))
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 12 // 4
    assert 0 <= summary["test"] <= 100
    with pytest.raises(RecipeError, match=r"--data .*imagenet"):
        paper_data.open_data(setting_of(*words), SimpleNamespace(world_size=1, rank=0))


# --- Data -----------------------------------------------------------------------------------------


def test_every_sixth_of_the_digits_is_held_out() -> None:
    images = image_sets.open_images("digits", None)
    sizes = [len(part.labels) for part in (images.train, images.validation, images.test)]
    assert sizes == [1202, 240, 355]
    assert images.train.images.shape[1:] == (1, 8, 8)
    everything = torch.cat([images.train.images, images.validation.images])
    assert float(everything.mean()) == pytest.approx(0, abs=1e-3)
    assert len(image_sets.open_images("digits", None, hold_out=0).validation.labels) == 0


def idx(values: np.ndarray[Any, Any]) -> bytes:
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()


@pytest.mark.parametrize(("name", "kind"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_mnist_is_read_from_torchvision_s_files(name: str, kind: str, tmp_path: Path) -> None:
    raw = tmp_path / kind / "raw"
    raw.mkdir(parents=True)
    for split, count in (("train", 24), ("t10k", 10)):
        pixels = np.random.default_rng(0).integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        for word, values in (("images-idx3", pixels), ("labels-idx1", labels)):
            (raw / f"{split}-{word}-ubyte").write_bytes(idx(values))
            (raw / f"{split}-{word}-ubyte.gz").write_bytes(gzip.compress(b""))
    images = image_sets.open_images(name, tmp_path)
    assert images.train.images.shape == (20, 1, 28, 28)
    assert images.test.labels.tolist() == list(range(10))


def test_colours_come_last_or_first_by_data_set() -> None:
    pixels = np.zeros((4, 3, 32, 32), dtype=np.uint8)
    svhn = public_sets._arrays(SimpleNamespace(data=pixels, labels=np.arange(4)))
    cifar = public_sets._arrays(SimpleNamespace(data=pixels.transpose(0, 2, 3, 1), targets=[0] * 4))
    assert svhn.images.shape == cifar.images.shape == (4, 32, 32, 3)


@pytest.mark.parametrize(
    ("name", "folder", "message"),
    [
        ("svhn", None, "--data .*svhn"),
        ("cifar100", "nowhere", "--data .*nowhere"),
        ("svhn", ".", "--data .*SVHN"),
        ("imagenet", ".", "--dataset 'imagenet'.* digits"),
        ("digits", "nowhere", "--data nowhere.* --dataset digits"),
    ],
)
def test_missing_data_is_an_error(name: str, folder: str | None, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        image_sets.open_images(name, None if folder is None else Path(folder))


# --- Training -------------------------------------------------------------------------------------

PER_RANK = LayerSampling(0.5, selection="per-rank", rule=Literal(1e-8))
EVERY = [
    (Dense(), "sgd", 1.0),
    (TopK(0.3), "lars", 0.3),
    (LayerSampling(0.6, "bytes", topk=0.05), "lars", 0.05),
    (LayerSampling(0.5, "bytes"), "lars", 0.5),
    (LayerSampling(0.5, rule=None), "lars-own", 0.5),
    # The ranks exchange what either of the two keeps.
    (PER_RANK, "sgd", 0.75),
]


def test_methods_train_and_send_their_share(tmp_path: Path) -> None:
    images = image_sets.open_images("digits", None)
    size = replace(large_batch.QUICK, epochs=5)
    torch.manual_seed(0)
    start = networks.small_network("mlp", image_sets.SIZES["digits"]).state_dict()

    def body(method: Any, optimizer: str) -> Outcome:
        data = large_batch.batches_of(images, size, seed=0)
        lr = 0.03 if optimizer == "sgd" else 0.3
        hyperparameters = layer_training.paper_schedule(15, lr, optimizer)
        module = networks.small_network("mlp", image_sets.SIZES["digits"])
        module.load_state_dict(start)
        log = tmp_path / "metrics.jsonl"
        return layer_training.train(module, data, method, hyperparameters, 0, log)

    for method, optimizer, share in EVERY:
        first, second = on_threads(2, body, method, optimizer)
        assert first.test == second.test > 20, method
        assert 0 < first.backward_ms <= first.step_ms
        assert first.bytes_share == pytest.approx(share, abs=0.12)
        if isinstance(method, LayerSampling):
            rows = [json.loads(s) for s in (tmp_path / "metrics.jsonl").read_text().splitlines()]
            assert [row["step"] for row in rows] == list(range(1, 16))
            assert len(rows[0]["p"]) == 22


def test_a_run_that_diverges_scores_nan() -> None:
    images = image_sets.open_images("digits", None)

    def body() -> Outcome:
        data = large_batch.batches_of(images, large_batch.QUICK, seed=0)
        hyperparameters = Hyperparameters(steps=4, warmup=1, drops=(), lr=1e30)
        module = networks.small_network("mlp", image_sets.SIZES["digits"])
        return layer_training.train(module, data, LayerSampling(0.5), hyperparameters, 0)

    for outcome in on_threads(2, body):
        assert math.isnan(outcome.test)
        assert math.isnan(outcome.validation)


def test_networks_have_at_least_20_layers() -> None:
    for kind in ("mlp", "conv"):
        for name in ("digits", "cifar100"):
            sizes = image_sets.SIZES[name]
            model = networks.small_network(kind, sizes)
            assert len(backward.default_layers(model.named_parameters())) == 22
            images = torch.zeros(2, sizes.channels, sizes.size, sizes.size)
            assert model(images).shape == (2, sizes.classes)


# --- Tables and pictures --------------------------------------------------------------------------


def run_of(who: Contender, lr: float, seed: int, validation: float, test: float) -> TrainingRun:
    outcome = Outcome(validation, test, 0.6, 9.0, 5.0, 1.0)
    return TrainingRun(PlannedRun(who, lr, seed), outcome)


def test_held_out_images_select_the_lr_and_test_images_are_reported(tmp_path: Path) -> None:
    method, task = Contender(LayerSampling(0.6), "lars-own"), "digits, mlp"
    dense = Contender(Dense())
    table = ResultTable(tmp_path / TABLE, run_table.COLUMNS, task, resume=False)
    for seed in range(3):
        table.add(run_of(method, 0.3, seed, 95.0, 90.0 + seed).cells())
        table.add(run_of(method, 1.0, seed, 94.0 + seed / 10, 99.0).cells())
        table.add(run_of(dense, 1.0, seed, 97.0, (92.0, 92.5, 95.0)[seed]).cells())
    runs = run_table.read_runs(tmp_path, task)
    assert len(runs) == 9
    chosen, reference = run_table.summaries(runs)
    assert (chosen.contender, chosen.lr, chosen.failed) == (method, 0.3, 0)
    assert (chosen.accuracy.mean, chosen.accuracy.deviation) == (91.0, 1.0)
    # Paired by seed: -2, -1.5 and -3.
    assert chosen.against(reference) == spread([-2.0, -1.5, -3.0])
    assert "JointSpar-LARS, own norm" in run_table.summary_table([chosen])
    with pytest.raises(RecipeError, match=r"digits, mlp.*cifar10, conv"):
        run_table.read_runs(tmp_path, "cifar10, conv")


def test_runs_that_fail_are_counted_and_left_out() -> None:
    unstable, dense = Contender(LayerSampling(0.3)), Contender(Dense())
    tests = {0: 97.0, 1: math.nan, 2: 86.9, 3: 88.1}
    runs = [run_of(unstable, 0.3, seed, 90.0, test) for seed, test in tests.items()]
    runs += [run_of(dense, 0.3, seed, 90.0, 98.0) for seed in tests]
    summary, reference = run_table.summaries(runs)
    # Ten points below dense training is the limit.
    assert summary.finished == {0: 97.0, 3: 88.1}
    assert (summary.failed, reference.failed) == (2, 0)
    assert summary.against(reference).mean == pytest.approx(-5.45)


@pytest.mark.thorough
def test_pictures_are_drawn_from_the_published_results(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "results", tmp_path, dirs_exist_ok=True)
    runs = run_table.read_runs(tmp_path, large_batch.task_of("digits", "mlp", large_batch.WHOLE))
    pictures = {path.name: path for path in tmp_path.glob("*.png")}
    for path in pictures.values():
        path.unlink()
    summaries = run_table.summaries(runs)
    drawing.draw_accuracy(summaries, pictures["accuracy.png"])
    drawing.draw_wall_clock(tmp_path / "wall_clock.csv", summaries, pictures["wall_clock.png"])
    drawing.draw_probabilities(tmp_path / "metrics.jsonl", pictures["probabilities.png"])
    backward.draw(tmp_path / "backward.csv", pictures["backward.png"])
    selection.draw(tmp_path / "selection.csv", pictures["selection.png"])
    bandit.draw(tmp_path / "bandit.csv", tmp_path / "bandit_curves.csv", pictures["bandit.png"])
    curves = read_csv(tmp_path / "convergence_curves.csv")
    lrs = convergence_summary.chosen_lrs(read_csv(tmp_path / "convergence_tuning.csv"))
    for optimizer in convergence.OPTIMIZERS:
        path = pictures[f"convergence_{optimizer}.png"]
        convergence_drawing.draw_convergence(optimizer, curves, lrs, path)
    for path in pictures.values():
        assert path.read_bytes().startswith(b"\x89PNG")


def test_all_runs_come_in_whole_rounds() -> None:
    runs = list(large_batch.everything(large_batch.WHOLE, (3, 0)))
    per_seed = len(runs) // 2
    assert [run.seed for run in runs] == [3] * per_seed + [0] * per_seed
    assert len(set(runs)) == len(runs)


def test_the_union_of_per_rank_sets_has_its_expected_size() -> None:
    sizes = np.ones(200)
    for ranks in (2, 8):
        union, per_rank, shared = selection.measure(sizes, 0.3, ranks, seed=0)
        assert union == pytest.approx(1 - 0.7**ranks, abs=0.01)
        assert per_rank == pytest.approx(union, abs=0.01)
        assert shared == pytest.approx(0.3, abs=0.01)


def test_the_baseline_form_learns_and_uniform_does_not() -> None:
    learned, uniform = bandit.run(Baseline(0.03), 0, 400), bandit.run(None, 0, 400)
    assert len(learned) == len(uniform) == 800
    # The norms change after half of the steps, and it learns again.
    assert learned[399] < 0.05 < uniform[399]
    assert learned[400] > learned[799]
    assert bandit.cells_of(uniform)[2] == "never"
    assert isinstance(bandit.cells_of(learned)[2], int)


def test_names_of_forms_are_their_rules() -> None:
    rules = [bandit.rule_of(form, seed=0) for form in bandit.forms()]
    assert rules[:4] == [None, *map(Baseline, bandit.ALPHAS)]
    assert rules[4:] == [bandit.literal(alpha, 0) for alpha in bandit.LITERAL_ALPHAS]


def test_measured_backward_passes_count_fewer_kernels_for_fewer_layers() -> None:
    case = backward.NetworkCase("tiny", lambda: networks.deep_mlp(16, 16, 8, 4), torch.ones(4, 16))
    (rows,) = on_threads(1, backward.measure, case, 42)
    kernels = {row.way: row.mean_kernels for row in rows}
    assert kernels["plain DDP"] == kernels["budget 100%"] == 8 + 7
    assert kernels["budget 25%"] < kernels["budget 50%"] < kernels["budget 75%"] < 15
    assert kernels["front dropped"] < kernels["back dropped"]
    cells = backward.cells_of(rows)
    assert [cell[6] for cell in cells if cell[1] == "plain DDP"] == ["1.000"]
    # Seven layers of 16 x 17 weights and one of 4 x 17: the last four are 13/29 of them.
    assert [cell[4] for cell in cells if cell[1] == "front dropped"] == ["0.448"]


# --- Bad input ------------------------------------------------------------------------------------


def error_of(program: Any, words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the one line that the program ends with."""
    monkeypatch.setattr(sys, "argv", [f"recipes/jointspar/{program.__name__}.py", *words])
    with pytest.raises(SystemExit) as ended:
        program.main()
    line = str(ended.value)
    assert line.startswith("error: ")
    assert "\n" not in line
    return line


@pytest.mark.parametrize("program", [large_batch, experiment])
def test_runs_of_another_task_are_not_resumed(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = large_batch.task_of("digits", "mlp", large_batch.WHOLE)
    path = tmp_path / TABLE
    ResultTable(path, run_table.COLUMNS, whole, resume=False).save()
    before = path.read_text()
    words = ["--resume", "--out", str(tmp_path)]
    tasks = {"--quick": large_batch.task_of("digits", "mlp", large_batch.QUICK)}
    if program is large_batch:
        tasks["--network=conv"] = large_batch.task_of("digits", "conv", large_batch.WHOLE)
    for flag, task in tasks.items():
        line = error_of(program, [*words, flag], monkeypatch)
        assert whole in line
        assert task in line
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_published_tables_are_resumed_with_nothing_missing() -> None:
    table = large_batch.open_table(large_batch.parse(["--resume"]))
    runs = [TrainingRun.of(row) for row in table.rows]
    arguments = large_batch.parse(["--resume"])
    assert large_batch.missing(arguments, runs) == []
    assert large_batch.missing(arguments, runs[1:]) == [runs[0].planned]
    counts = {part: len(part.open_table(part.parse(["--resume"])).rows) for part in PARTS.values()}
    rows = [counts[part] for part in (backward, selection, wall_clock)]
    assert rows == [21, 12 * len(SEEDS), 18]
    for opened in (bandit.open_table, bandit.open_curves):
        found = [(row["form"], row["seed"]) for row in opened(bandit.parse(["--resume"])).rows]
        assert found == [(form, str(seed)) for seed in SEEDS for form in bandit.forms()]


def test_finished_runs_without_their_log_are_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(FOLDER / "results" / TABLE, tmp_path)
    words = ["--resume", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["recipes/jointspar/large_batch.py", *words])
    large_batch.main()
    assert (tmp_path / "accuracy.png").exists()
    assert not (tmp_path / "probabilities.png").exists()


@pytest.mark.parametrize("program", [*PARTS.values(), experiment])
def test_an_out_that_is_a_file_is_an_error_before_anything_starts(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.touch()
    assert str(path) in error_of(program, ["--out", str(path)], monkeypatch)


@pytest.mark.parametrize(
    ("program", "words", "message"),
    [
        (backward, ["--rounds", "0"], "--rounds.* 15.* 0"),
        (backward, ["--rounds", "-3"], "--rounds.* 15.* -3"),
        (large_batch, ["--data", "/nowhere"], "--data /nowhere.* --dataset digits"),
        (wall_clock, ["--mbit", "0"], "--mbit.* 1.* 0"),
        (wall_clock, [], "large_batch.csv.* recipes.jointspar.large_batch"),
        (experiment, ["--only", "bandit", "wall_clock"], "large_batch.csv"),
        (experiment, ["--only", "bandits"], "--only.*'bandits'"),
        (bandit, ["--quik"], "--quik"),
    ],
)
def test_bad_flags_are_errors(
    program: Any, words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = error_of(program, [*words, "--out", str(tmp_path)], monkeypatch)
    assert re.search(message, line), line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("program", [*PARTS.values(), experiment])
def test_a_quick_run_does_not_overwrite_the_published_results(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert program.parse([]).out == FOLDER / "results"
    assert program.parse(["--quick"]).out == Path("runs/jointspar-quick")
    words = ["--quick", "--out", str(FOLDER / "results")]
    assert re.search("--quick.*--out.*results", error_of(program, words, monkeypatch))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (backward, ["--rounds", "20"]),
        (wall_clock, ["--mbit", "1000"]),
        (wall_clock, ["--delay-us", "0"]),
        (wall_clock, ["--steps", "6"]),
        (large_batch, ["--network", "conv"]),
        (convergence, ["--workers", "2"]),
        (bandit, ["--seeds", "3,7"]),
    ],
)
def test_other_settings_do_not_overwrite_the_published_results(
    program: Any, words: list[str]
) -> None:
    assert program.parse(words).out == Path("runs/jointspar")


def test_learned_and_uniform_p_are_compared_at_chosen_and_at_equal_learning_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_batch, "BUDGETS", (0.6,))
    task = large_batch.task_of("digits", "mlp", large_batch.WHOLE)
    table = ResultTable(tmp_path / TABLE, run_table.COLUMNS, task, resume=False)
    # By learning rate: held-out and test accuracy. Own norms choose 0.3 and 0.6.
    learned, uniform = {0.3: (97, 96), 0.6: (95, 95)}, {0.3: (94, 94), 0.6: (98, 97)}
    for rule, by_lr in ((Baseline(), learned), (None, uniform)):
        method = LayerSampling(0.6, "bytes", rule=rule)
        for optimizer in ("lars", "lars-own"):
            for lr, (validation, test) in by_lr.items():
                for seed in range(2):
                    run = run_of(Contender(method, optimizer), lr, seed, validation, test)
                    table.add(run.cells())
    for seed in range(2):
        table.add(run_of(Contender(Dense()), 0.3, seed, 97.0, 97.0).cells())
    line = tables.TABLES["learned"](tmp_path).splitlines()[2]
    cells = [cell.strip() for cell in line.split("|")[3:-1]]
    assert cells[0] == "-1.00 ± 0.00, lr 0.3 and 0.6"
    assert cells[1:] == ["+2.00 ± 0.00", "-2.00 ± 0.00"]


def test_flags_are_passed_to_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def start(command: list[str]) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=len(commands) - 1)

    monkeypatch.setattr(experiment, "subprocess", SimpleNamespace(run=start))
    words = ["--quick", "--resume", "--out", str(tmp_path), "--only", "selection", "bandit"]
    words += ["--seeds", "3,7"]
    monkeypatch.setattr(sys, "argv", ["experiment.py", *words])
    with pytest.raises(SystemExit) as ended:
        experiment.main()
    # The parts run in their own order, and the status of the first failure is returned.
    assert [command[2] for command in commands] == [
        "recipes.jointspar.bandit",
        "recipes.jointspar.selection",
    ]
    flags = ["--out", str(tmp_path), "--seeds", "3,7", "--quick", "--resume"]
    assert all(command[3:] == flags for command in commands)
    assert ended.value.code == 1


def test_all_ranks_on_hosts_end_when_one_fails() -> None:
    python = [sys.executable, "-c"]
    sleeps = [*python, "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
    fails = [*python, "import sys, time; time.sleep(1); sys.exit('planted')"]
    lines = wall_clock.lines_of([sleeps, fails], "lo", PATIENCE)
    pid = next(lines)
    with pytest.raises(wall_clock.LaunchError, match=r"rank 1 (.|\n)*planted"):
        next(lines)
    assert not Path(f"/proc/{pid}").exists()


# --- Whole programs -------------------------------------------------------------------------------


@pytest.mark.thorough
def test_short_parts_run_and_resume(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "recipes.jointspar.experiment", "--quick"]
    command += ["--only", "bandit", "selection", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=PATIENCE)
    tables = _results(tmp_path)
    assert set(tables) == {"bandit.csv", "bandit_curves.csv", "selection.csv"}
    # An interruption before the last rows.
    for name in ("bandit.csv", "selection.csv"):
        lines = (tmp_path / name).read_text().splitlines(keepends=True)
        (tmp_path / name).write_text("".join(lines[:-1]))
    subprocess.run([*command, "--resume"], cwd=ROOT, check=True, timeout=PATIENCE)
    assert _results(tmp_path) == tables


def _results(folder: Path) -> dict[str, list[dict[str, str]]]:
    """Return the rows of every table, without what names their run."""
    return {
        path.name: [
            {name: cell for name, cell in row.items() if name not in PROVENANCE}
            for row in read_csv(path)
        ]
        for path in folder.glob("*.csv")
    }


@pytest.mark.slow
def test_the_quick_run_ends_and_is_resumed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "recipes.jointspar.large_batch", "--quick"]
    command += ["--out", str(tmp_path)]
    for more in ([], ["--resume"]):
        subprocess.run([*command, *more], cwd=ROOT, check=True, timeout=PATIENCE)
    rows = read_csv(tmp_path / TABLE)
    assert len(rows) == len(large_batch.contenders((0.6,)))
    assert (tmp_path / "probabilities.png").exists()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_a_short_run_on_shaped_hosts(tmp_path: Path) -> None:
    task = large_batch.task_of("digits", "mlp", large_batch.WHOLE)
    table = ResultTable(tmp_path / TABLE, run_table.COLUMNS, task, resume=False)
    for method in (Dense(), LayerSampling(0.6, "bytes")):
        table.add(run_of(Contender(method), 0.3, 0, 95.0, 95.0).cells())
    command = [sys.executable, "-m", "recipes.jointspar.wall_clock", "--steps", "6"]
    command += ["--out", str(tmp_path)]
    for more in ([], ["--resume"]):
        subprocess.run([*command, *more], cwd=ROOT, check=True, timeout=PATIENCE)
    assert len(read_csv(tmp_path / "wall_clock.csv")) == 2


def test_the_deep_mlp_has_the_requested_number_of_layers() -> None:
    model = networks.deep_mlp(4, 8, 20, 3)
    assert sum(isinstance(module, nn.Linear) for module in model) == 20
