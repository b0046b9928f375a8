"""The experiments on JointSpar: the paper's configurations, runs on two ranks, and the tables."""

import gzip
import json
import math
import os
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
from recipes.image_data import public_sets
from recipes.jointspar import (
    backward,
    bandit,
    drawing,
    image_sets,
    large_batch,
    layer_training,
    networks,
    paper,
    paper_data,
    run_table,
    selection,
    wall_clock,
)
from recipes.jointspar.layer_training import Course, Method, Outcome
from recipes.jointspar.paper_setting import Setting
from recipes.options import read_options
from recipes.result_files import read_csv
from recipes.settings import Settings
from tests.support.patience import PATIENCE
from tests.support.ranks import on_threads
from torchcomp.jointspar import Baseline

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes" / "jointspar"

CONFIGS = sorted((FOLDER / "configs").glob("*.yaml"))
SIX = {"mnist", "fashion-mnist", "svhn", "cifar10", "cifar100", "imagenet"}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def setting_of(*words: str) -> Setting:
    return read_options(Setting, list(words))


# --- The paper's configurations -------------------------------------------------------------------


def test_there_is_a_configuration_for_each_data_set_of_the_paper() -> None:
    assert {setting_of("--config", str(path)).dataset for path in CONFIGS} == SIX
    assert len(CONFIGS) == len(SIX)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configurations_are_the_papers_and_dry_run(path: Path) -> None:
    setting = setting_of("--config", str(path))
    facts = image_sets.FACTS[setting.dataset]
    per_epoch = facts.train_images // (16 * 1024)
    course = setting.course(per_epoch, workers=16)
    # Warm-up over 5 of 90 epochs to 16 times the rate of one worker; a tenth at 30, 50 and 70.
    assert course.steps == 90 * per_epoch
    epochs = (4, 5, 29, 30, 49, 50, 69, 70, 89)
    rates = [course.rate_at(epoch * per_epoch + per_epoch - 1) for epoch in epochs]
    tenths = (0, 0, 0, 1, 1, 2, 2, 3, 3)
    assert rates == pytest.approx([1.6 * 0.1**tenth for tenth in tenths])
    assert course.rate_at(0) == pytest.approx(1.6 / (5 * per_epoch))
    text = paper.describe(setting, 16)
    assert f"{facts.train_images:,} to train" in text
    assert "16 workers x 1024" in text
    assert f"{90 * per_epoch:,} (90 epochs of {per_epoch})" in text
    assert "method: jointspar" in text


@pytest.mark.thorough
def test_a_dry_run_from_the_command_line() -> None:
    command = [sys.executable, "-m", "recipes.jointspar.paper", "--dry-run", "--workers", "4"]
    command += ["--config", str(FOLDER / "configs" / "cifar10.yaml"), "--budget", "0.4"]
    printed = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, check=True
    ).stdout
    assert "budget: 0.4" in printed
    # 21 layers, and a 3x3 stem: 11,173,962 weights around a ring of 4.
    assert "layers           21: conv1" in printed
    assert f"{11_173_962 * 4 * 3 // 2:,} dense" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dataset", "cifar11"], "--dataset 'cifar11' is not one of .*nearest: cifar10"),
        (["--method", "joint"], "--method 'joint' is not one of dense, jointspar"),
        (["--epochs", "0"], "--epochs must be at least 1, found 0"),
        (["--warmup-epochs", "90"], "--warmup-epochs 90 leaves nothing of --epochs 90"),
        (["--drops", "50,30"], "--drops must rise and lie between 1 and 89 .*, found 50, 30"),
        (["--method", "dense"], "--budget 0.6 does not fit --method dense"),
        (["--rate", "nan"], "--rate: expected a finite number, found 'nan'"),
        (["--budget", "5"], "--budget must be at most 1, found 5.0"),
        (["--p-min", "3"], "--p-min must be at most 1, found 3.0"),
        (["--p-min", "0.7"], "--p-min 0.7 is above --budget 0.6"),
        (["--momentum", "2"], "--momentum must be below 1, found 2.0"),
        (["--config", "nowhere.yaml"], "no configuration file nowhere.yaml"),
    ],
)
def test_bad_settings_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        setting_of(*words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bugdet: 0.5", "unknown key 'bugdet' in .*; the nearest setting is 'budget'"),
        ("epochs: 0.5", "epochs: expected a whole number, found 0.5"),
        ("drops: 30", "drops: expected a list of epochs such as 30,60,80, found 30"),
        ("- 1", "holds no settings"),
        ("dataset: [", "bad.yaml is not YAML"),
    ],
)
def test_bad_configuration_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message):
        setting_of("--config", str(path))


def test_a_configuration_may_write_small_numbers_without_a_dot(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text("rate: 1e-3\ndrops: []\n")
    setting = setting_of("--config", str(path), "--alpha", "1e-4")
    assert (setting.rate, setting.drops, setting.alpha) == (1e-3, (), 1e-4)


def test_more_workers_than_images_are_refused() -> None:
    with pytest.raises(RecipeError, match="64 workers of 1024 images are more than"):
        paper.describe(setting_of("--dataset", "mnist"), 64)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """This process is the only rank, and in no group when the test is over."""
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
    # The first step keeps everything; then layers are drawn.
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
    words = ["--dataset", "imagenet", "--model", "torchvision/resnet18", "--batch", "4"]
    words += ["--epochs", "1", "--warmup-epochs", "0", "--drops", ""]
    paper.run(setting_of(*words, "--data", str(photo_folder), "--out", str(tmp_path / "out")))
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 12 // 4
    assert 0 <= summary["test"] <= 100
    with pytest.raises(RecipeError, match="--data is not given: imagenet is read from"):
        paper_data.open_data(setting_of(*words), SimpleNamespace(count=1, rank=0))


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
def test_mnist_is_read_as_torchvision_leaves_it(name: str, kind: str, tmp_path: Path) -> None:
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
    ("name", "given", "message"),
    [
        ("svhn", None, "--data is not given: svhn is read from there, and nothing is"),
        ("cifar100", "nowhere", "--data is nowhere, which does not exist"),
        ("svhn", ".", "torchvision finds no SVHN there"),
        ("imagenet", ".", "--dataset 'imagenet': expected one of digits"),
        ("digits", "nowhere", "--data nowhere: --dataset digits is embedded"),
    ],
)
def test_data_that_is_not_there_is_named(name: str, given: str | None, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        image_sets.open_images(name, None if given is None else Path(given))


# --- Training -------------------------------------------------------------------------------------

EVERY = [Method("dense"), Method("topk", 0.3), Method("jointspar+topk", 0.6)]
EVERY += [Method("jointspar", 0.5), Method("uniform", 0.5, "own")]


def test_methods_train_and_send_their_share(tmp_path: Path) -> None:
    images = image_sets.open_images("digits", None)
    size = replace(large_batch.QUICK, epochs=5)
    torch.manual_seed(0)
    start = networks.small_network("mlp", image_sets.FACTS["digits"]).state_dict()

    def body(method: Method) -> Outcome:
        data = large_batch.batches_of(images, size, seed=0)
        course = large_batch.course_of(size, data.steps_per_epoch, rate=0.3)
        module = networks.small_network("mlp", image_sets.FACTS["digits"])
        module.load_state_dict(start)
        return layer_training.train(module, data, method, course, 0, tmp_path / "metrics.jsonl")

    shares = {"dense": 1.0, "topk": 0.3, "jointspar": 0.5, "uniform": 0.5}
    for method in EVERY:
        first, second = on_threads(2, body, method)
        assert first.test == second.test > 20, method
        assert 0 < first.backward_ms <= first.step_ms
        assert first.bytes_share == pytest.approx(shares.get(method.kind, 0.05), abs=0.12)
        if method.samples:
            rows = [json.loads(s) for s in (tmp_path / "metrics.jsonl").read_text().splitlines()]
            assert [row["step"] for row in rows] == list(range(1, 16))
            assert len(rows[0]["p"]) == 22


def test_a_run_that_diverges_scores_nothing() -> None:
    images = image_sets.open_images("digits", None)

    def body() -> Outcome:
        data = large_batch.batches_of(images, large_batch.QUICK, seed=0)
        course = Course(steps=4, warmup=1, drops=(), rate=1e30)
        module = networks.small_network("mlp", image_sets.FACTS["digits"])
        return layer_training.train(module, data, Method("jointspar", 0.5), course, 0)

    for outcome in on_threads(2, body):
        assert math.isnan(outcome.test)
        assert math.isnan(outcome.validation)


def test_networks_have_at_least_20_layers() -> None:
    for kind in ("mlp", "conv"):
        for name in ("digits", "cifar100"):
            facts = image_sets.FACTS[name]
            model = networks.small_network(kind, facts)
            assert len(backward.default_layers(model.named_parameters())) == 22
            images = torch.zeros(2, facts.channels, facts.size, facts.size)
            assert model(images).shape == (2, facts.classes)


# --- Tables and pictures --------------------------------------------------------------------------


def run_of(method: Method, rate: float, seed: int, validation: float, test: float) -> Any:
    return run_table.Run(method, rate, seed, Outcome(validation, test, 0.6, 9.0, 5.0, 1.0))


def test_the_rate_is_chosen_by_held_out_images_and_reported_by_the_tests(tmp_path: Path) -> None:
    method, path = Method("jointspar", 0.6, "own"), tmp_path / "runs.csv"
    run_table.start_csv(path, "digits, mlp")
    for seed in range(3):
        run_table.append_csv(path, run_of(method, 0.3, seed, 95.0, 90.0 + seed))
        run_table.append_csv(path, run_of(method, 1.0, seed, 94.0 + seed / 10, 99.0))
        run_table.append_csv(path, run_of(Method("dense"), 1.0, seed, 97.0, math.nan))
    runs = run_table.read_runs(path, "digits, mlp")
    assert len(runs) == 9
    chosen, dense = run_table.summaries(runs)
    assert (chosen.method, chosen.rate, chosen.mean, chosen.deviation) == (method, 0.3, 91.0, 1.0)
    assert dense.mean == 0
    assert "jointspar, own norm" in run_table.summary_table([chosen])
    assert path.read_text().startswith("# command: python ")
    drawing.draw_accuracy([chosen, dense], tmp_path / "accuracy.png")
    table = "kind,budget,norm,mbit,accuracy,deviation,seconds"
    (tmp_path / "wall.csv").write_text(f"# command\n{table}\njointspar,0.6,own,100,97,0.5,9.1\n")
    drawing.draw_wall_clock(tmp_path / "wall.csv", tmp_path / "wall_clock.png")
    rows = [{"p": {"a": 0.5, "b": 0.7}, "kept": ["b"], "step": step} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    drawing.draw_probabilities(tmp_path / "metrics.jsonl", tmp_path / "probabilities.png")
    for name in ("accuracy", "wall_clock", "probabilities"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_all_runs_come_in_whole_rounds() -> None:
    plans = list(large_batch.everything(large_batch.WHOLE))
    per_seed = len(plans) // 5
    assert [plan.seed for plan in plans] == [place // per_seed for place in range(len(plans))]
    assert len(set(plans)) == len(plans)


def test_the_union_of_private_sets_is_what_chance_says() -> None:
    sizes = np.ones(200)
    for ranks in (2, 8):
        union, own, shared = selection.measure(sizes, 0.3, ranks)
        assert union == pytest.approx(1 - 0.7**ranks, abs=0.01)
        assert own == pytest.approx(union, abs=0.01)
        assert shared == pytest.approx(0.3, abs=0.01)


def test_the_baseline_form_learns_and_uniform_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandit, "STEPS", 400)
    learned, uniform = bandit.run(Baseline(0.03), 0), bandit.run(None, 0)
    assert len(learned) == len(uniform) == 800
    # The norms change half-way, and it learns again.
    assert learned[399] < 0.05 < uniform[399]
    assert learned[400] > learned[799]
    named = [bandit.Result("uniform", uniform), bandit.Result("baseline", learned)]
    assert bandit.rows_of(named)[0][3] == "never"
    assert isinstance(bandit.rows_of(named)[1][3], int)


def test_measured_backward_passes_count_fewer_kernels_for_fewer_layers() -> None:
    problem = backward.Problem("tiny", lambda: networks.deep_mlp(16, 16, 8, 4), torch.ones(4, 16))
    (rows,) = on_threads(1, backward.measure, problem, 42)
    kernels = {row.way: row.mean_kernels for row in rows}
    assert kernels["plain DDP"] == kernels["budget 100%"] == 8 + 7
    assert kernels["budget 25%"] < kernels["budget 50%"] < kernels["budget 75%"] < 15
    assert kernels["front dropped"] < kernels["back dropped"]
    cells = backward.cells_of(rows)
    assert [cell[6] for cell in cells if cell[1] == "plain DDP"] == ["1.000"]
    # Seven layers of 16 x 17 weights and one of 4 x 17: the last four are 13/29 of them.
    assert [cell[4] for cell in cells if cell[1] == "front dropped"] == ["0.448"]


# --- Input that cannot be used --------------------------------------------------------------------


def told_by(script: Any, words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The line that a program ends with, in which it must not have started any work."""
    monkeypatch.setattr(sys, "argv", [f"recipes/jointspar/{script.__name__}.py", *words])
    with pytest.raises(SystemExit) as ended:
        script.main()
    line = str(ended.value)
    assert line.startswith("error: ")
    assert "\n" not in line
    return line


def test_runs_of_another_task_are_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = large_batch.task_of("digits", "mlp", large_batch.WHOLE)
    run_table.start_csv(tmp_path / "large_batch.csv", whole)
    before = (tmp_path / "large_batch.csv").read_text()
    words = ["--resume", "--out", str(tmp_path)]
    asked = {
        "--quick": large_batch.task_of("digits", "mlp", large_batch.QUICK),
        "--network=conv": large_batch.task_of("digits", "conv", large_batch.WHOLE),
    }
    for flag, task in asked.items():
        line = told_by(large_batch, [*words, flag], monkeypatch)
        assert f"holds runs of {whole}, which say nothing of {task}" in line
    assert (tmp_path / "large_batch.csv").read_text() == before


def test_the_published_runs_can_be_gone_on_with() -> None:
    task = large_batch.task_of("digits", "mlp", large_batch.WHOLE)
    runs = run_table.read_runs(FOLDER / "results" / "large_batch.csv", task)
    assert large_batch.missing(large_batch.WHOLE, runs) == []
    assert large_batch.missing(large_batch.WHOLE, runs[1:]) == [
        large_batch.Plan(runs[0].method, runs[0].rate, runs[0].seed)
    ]


@pytest.mark.parametrize("script", [backward, bandit, large_batch, selection])
def test_an_out_that_is_a_file_is_told_before_anything_starts(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.touch()
    line = told_by(script, ["--out", str(path)], monkeypatch)
    assert line == f"error: --out {path} must be a folder, and cannot be made: File exists"


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        (backward, ["--rounds", "0"], "--rounds must be a whole number of at least 15, not 0"),
        (backward, ["--rounds", "-3"], "--rounds must be a whole number of at least 15, not -3"),
        (large_batch, ["--data", "/nowhere"], "--data /nowhere: --dataset digits is embedded"),
        (wall_clock, ["--mbit", "0"], "--mbit must be a whole number of at least 1, not 0"),
        (wall_clock, [], "large_batch.csv: recipes.jointspar.large_batch writes it first"),
    ],
)
def test_flags_that_cannot_be_used_are_told(
    script: Any, words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert message in told_by(script, [*words, "--out", str(tmp_path)], monkeypatch)
    assert list(tmp_path.iterdir()) == []


def test_ranks_on_hosts_end_with_the_one_that_fails() -> None:
    python = [sys.executable, "-c"]
    sleeps = [*python, "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
    fails = [*python, "import sys, time; time.sleep(1); sys.exit('planted')"]
    lines = wall_clock.lines_of([sleeps, fails], "lo", PATIENCE)
    pid = next(lines)
    with pytest.raises(wall_clock.LaunchError, match="rank 1 failed:\nplanted"):
        next(lines)
    assert not Path(f"/proc/{pid}").exists()


# --- Whole scripts --------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_quick_run_ends_and_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "recipes.jointspar.large_batch", "--quick"]
    command += ["--out", str(tmp_path)]
    for more in ([], ["--resume"]):
        subprocess.run([*command, *more], cwd=ROOT, check=True, timeout=PATIENCE)
    assert len(read_csv(tmp_path / "large_batch.csv")) == 2 * len(large_batch.methods((0.6,)))
    assert (tmp_path / "probabilities.png").exists()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_a_short_run_on_shaped_hosts(tmp_path: Path) -> None:
    path = tmp_path / "large_batch.csv"
    run_table.start_csv(path, large_batch.task_of("digits", "mlp", large_batch.WHOLE))
    for method in (Method("dense"), Method("jointspar", 0.6)):
        run_table.append_csv(path, run_of(method, 0.3, 0, 95.0, 95.0))
    command = [sys.executable, "-m", "recipes.jointspar.wall_clock", "--steps", "6"]
    subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, check=True, timeout=PATIENCE)
    assert len(read_csv(tmp_path / "wall_clock.csv")) == 2


def test_linear_layers_of_the_deep_mlp_are_as_many_as_asked_for() -> None:
    model = networks.deep_mlp(4, 8, 20, 3)
    assert sum(isinstance(module, nn.Linear) for module in model) == 20
